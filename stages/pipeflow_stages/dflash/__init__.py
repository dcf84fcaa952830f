"""DFlash: a block-diffusion drafter for speculative decoding (arXiv 2602.06036).

The algorithm, free of any engine: `taps` (features of the frozen target), `anchors` (where blocks start),
`mask` (who sees whom), `model` (the drafter), `loss`, `decode` (acceptance), `export` (its files).
Symbols: b rows, S positions, K taps, H hidden size, N blocks a row, B slots a block, V vocabulary.
"""
