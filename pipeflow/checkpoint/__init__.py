"""Checkpoints and resume: what a run saves while it goes on, and how another one goes on from it.

`saver` decides when, `station` takes the state of one stage at a cut, `needs` works out from where the
stages before are to be repeated, `store` writes and reads folders, `resuming` brings one back.
"""
