"""A state as it is saved: JSON, with its tensors taken out and named.

What `state()` may return: dicts with text keys, lists, text, numbers, booleans, None, and tensors anywhere in
it. A tuple comes back as a list. Anything else is a TypeError that says where it stands.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

from pipeflow.device.base import is_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["join", "split"]

_TENSOR = "$tensor"
_FLOAT = "$float"


def split(value: Any, name: str, tensors: dict[str, Any], take: Callable[[Any], Any]) -> Any:
    """The JSON of a state. Its tensors go into `tensors` under their path from `name`, as `take` copies them.

    Nothing of the result is shared with `value`, so the stage may go on.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if is_tensor(value):
        tensors[name] = take(value)
        return {_TENSOR: name}
    if isinstance(value, (list, tuple)):
        items = cast("list[Any]", value)
        return [split(item, f"{name}/{index}", tensors, take) for index, item in enumerate(items)]
    if isinstance(value, dict):
        made: dict[str, Any] = {}
        for key, item in cast("dict[Any, Any]", value).items():
            if not isinstance(key, str) or key in (_TENSOR, _FLOAT):
                raise TypeError(f"{name}: the key {key!r} of a state must be text (and none of the engine's)")
            made[key] = split(item, f"{name}/{key}", tensors, take)
        return made
    raise TypeError(f"{name}: a {type(value).__name__} cannot be saved; a state is JSON values and tensors")


def join(plain: Any, tensors: Mapping[str, Any]) -> Any:
    """The state again."""
    if isinstance(plain, list):
        return [join(item, tensors) for item in cast("list[Any]", plain)]
    if isinstance(plain, dict):
        found = cast("dict[str, Any]", plain)
        if _TENSOR in found:
            return tensors[found[_TENSOR]]
        if _FLOAT in found:
            return float(found[_FLOAT])
        return {key: join(item, tensors) for key, item in found.items()}
    return plain
