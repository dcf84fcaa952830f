"""The role of held-out text: a resource that opens to a list of `TokenRow`."""

from __future__ import annotations

from pipeflow.stage import Resource

__all__ = ["Rows"]


class Rows(Resource):
    """Opens to a list of `TokenRow`. What evaluation reads."""
