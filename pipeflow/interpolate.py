"""References in scalars: `${env:NAME}`, `${env:NAME:-default}`, `${params.x}`, `${secret:NAME}`, `$${`.

Only scalar nodes are looked at, after the file has been read, so no variable can add keys or break YAML.

    a scalar that is one parameter            the parameter as it is, with its type, quoted or not
    a plain scalar that is one variable       the variable's text, read as a YAML scalar
    a quoted one, or one within other text    text
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Never

from pipeflow.diagnostic import Diagnostic, suggest
from pipeflow.nodes import Entry, ListNode, MapNode, Node, Path_, Scalar, dotted
from pipeflow.scalars import escape, read_plain
from pipeflow.scrub import SHORTEST, Scrubber

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["interpolate"]

_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}\n]*)\}|\$\{")
_ENV = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?")
_SECRET = re.compile(r"secret:([A-Za-z_][A-Za-z0-9_]*)")
_PARAM = re.compile(r"params((?:\.[^.\s]+)+)")
_FORMS = "${env:NAME}, ${env:NAME:-default}, ${secret:NAME} or ${params.NAME}; $${ is a literal ${"
# Parameters that refer to parameters, and the levels they are nested in: each costs several Python frames.
_MAX_CHAIN = 50
_MAX_LEVEL = 100


def interpolate(root: MapNode, env: Mapping[str, str]) -> tuple[MapNode, list[Diagnostic], Scrubber]:
    """The tree with every reference resolved, all faults, and what takes its secrets out of texts.

    Faults: `missing-env` for a variable that is not set, `unknown-key` for an unknown parameter, `syntax` for
    a circle and for what is no reference, `wrong-type` for a secret that is too short to be hidden."""
    work = _Interpolation(root, env)
    done = work.node(root, ())
    assert isinstance(done, MapNode)
    return done, work.found, Scrubber(work.secrets)


class _Failed(Exception):
    """A reference that could not be resolved; it has been reported."""


class _Interpolation:
    def __init__(self, root: MapNode, env: Mapping[str, str]) -> None:
        self.found: list[Diagnostic] = []
        self.secrets: dict[str, str] = {}
        self._root = root
        self._env = env
        self._done: dict[int, Node] = {}
        self._chain: list[Path_] = []
        self._level = 0

    def node(self, node: Node, path: Path_) -> Node:
        """The resolved node: the same one where nothing in it is a reference."""
        done = self._done.get(id(node))
        if done is not None:
            return done
        if isinstance(node, Scalar):
            if not (isinstance(node.value, str) and "${" in node.value):
                return node
            made: Node = self._scalar(node, path)
        else:
            self._level += 1
            made = self._map(node, path) if isinstance(node, MapNode) else self._list(node, path)
            self._level -= 1
        self._done[id(node)] = made
        return made

    def _map(self, node: MapNode, path: Path_) -> MapNode:
        entries = {k: Entry(e.key_place, self.node(e.node, (*path, k))) for k, e in node.entries.items()}
        same = all(entries[k].node is e.node for k, e in node.entries.items())
        return node if same else MapNode(entries, node.place)

    def _list(self, node: ListNode, path: Path_) -> ListNode:
        items = [self.node(item, (*path, i)) for i, item in enumerate(node.items)]
        same = all(new is old for new, old in zip(items, node.items, strict=True))
        return node if same else ListNode(items, node.place)

    def _scalar(self, node: Scalar, path: Path_) -> Node:
        text = str(node.value)
        whole = _REFERENCE.fullmatch(text)
        try:
            if whole and whole[1] is not None:
                return self._whole(whole[1], node, path)
        except _Failed:
            return _broken(node)
        made: list[str] = []
        shown: list[str] = []
        secret = failed = False
        end = 0
        for match in _REFERENCE.finditer(text):
            between = text[end : match.start()]
            end = match.end()
            try:
                value, hidden = self._part(match, node, path)
            except _Failed:
                failed = True  # go on: the other references of this text may fail too
                continue
            made += [between, value]
            shown += [escape(between), hidden or escape(value)]
            secret = secret or hidden is not None
        if failed:
            return _broken(node)
        made.append(text[end:])
        shown.append(escape(text[end:]))
        full = "".join(made)
        return Scalar(full, node.place, full, False, node.folder, secret, "".join(shown) if secret else "")

    def _whole(self, body: str, node: Scalar, path: Path_) -> Node:
        parameter = _PARAM.fullmatch(body)
        if parameter:
            # Quotes or not: a parameter has a type of its own, and inside { } quotes cannot be left off.
            return self._parameter(body, node, path)
        text, hidden = self._variable(body, node, path)
        value = read_plain(text) if node.plain else text
        return Scalar(value, node.place, text, node.plain, node.folder, hidden is not None, hidden or "")

    def _part(self, match: re.Match[str], node: Scalar, path: Path_) -> tuple[str, str | None]:
        """The text of one reference within others, and what to show instead where it is secret."""
        if match[0] == "$${":
            return "${", None
        body = match[1]
        if body is None:
            self._fail(node, path, "`${` is not closed by `}`", f"write {_FORMS}")
        if not _PARAM.fullmatch(body):
            return self._variable(body, node, path)
        target = self._parameter(body, node, path)
        if not isinstance(target, Scalar) or target.value is None:
            kind = "null" if isinstance(target, Scalar) else _kind(target)
            message = f"${{{body}}} is {kind}, which cannot stand within text"
            self._fail(node, path, message, "let it be the whole value", "wrong-type")
        return target.text, target.shown if target.secret else None

    def _variable(self, body: str, node: Scalar, path: Path_) -> tuple[str, str | None]:
        secret = _SECRET.fullmatch(body)
        env = _ENV.fullmatch(body)
        if secret is None and env is None:
            near = suggest(re.split(r"[:.]", body, maxsplit=1)[0], ["env", "secret", "params"])
            message = f"${{{body}}} is not a reference"
            self._fail(node, path, message, f"{near + ' ' if near else ''}write {_FORMS}")
        name = str(secret[1] if secret else env[1] if env else "")
        default = env[2] if env else None
        value = self._env.get(name)
        if default is not None and not value:
            value = default
        if value is None:
            remedy = f"set it: export {name}=..."
            if env:
                remedy += f" or give a default: ${{env:{name}:-VALUE}}"
            self._fail(node, path, f"the environment variable {name} is not set", remedy, "missing-env")
        if any("\ud800" <= char <= "\udfff" for char in value):
            message = f"the environment variable {name} is not UTF-8 text"
            self._fail(node, path, message, "set it to text", "wrong-type")
        if secret is None:
            return value, None
        if value:
            if len(value.strip()) < SHORTEST:
                message = f"the secret {name} is shorter than {SHORTEST} characters, so it cannot be hidden"
                self._fail(node, path, message, "set a longer one, or write ${env:..}", "wrong-type")
            self.secrets.setdefault(value, f"${{{body}}}")
        return value, f"${{{body}}}"

    def _parameter(self, body: str, node: Scalar, path: Path_) -> Node:
        names = body.split(".")[1:]
        full: Path_ = ("params", *names)
        current: Node = self._root.get("params") or MapNode({}, node.place)
        for i, name in enumerate(names):
            current = self._resolved(("params", *names[:i]), current, node, path, step=True)
            if not isinstance(current, MapNode):
                message = f"{'.'.join(['params', *names[:i]])} is not a mapping, so it has no key {name!r}"
                self._fail(node, path, message, "", "unknown-key")
            entry = current.entries.get(name)
            if entry is None:
                known = list(current.entries)
                near = suggest(name, known) or (f"known: {', '.join(known[:12])}" if known else "add it")
                where = ".".join(["params", *names[: i + 1]])
                self._fail(node, path, f"there is no {where}", near, "unknown-key")
            current = entry.node
        target = self._resolved(full, current, node, path)
        if isinstance(target, Scalar) and target.broken:
            raise _Failed
        return target

    def _resolved(self, full: Path_, raw: Node, node: Scalar, path: Path_, *, step: bool = False) -> Node:
        """The node at a parameter, itself resolved. On the way to one (`step`) a mapping is left as it is:
        `params.a.b` may refer to `params.a.c`."""
        if step and not isinstance(raw, Scalar):
            return raw
        if full in self._chain:
            circle = [*self._chain[self._chain.index(full) :], full]
            message = f"parameters refer to each other in a circle: {' -> '.join(map(dotted, circle))}"
            self._fail(node, path, message, "give one of them a value")
        if len(self._chain) >= _MAX_CHAIN or self._level > _MAX_LEVEL:
            self._fail(node, path, "this parameter refers to too many others in turn", "shorten the chain")
        self._chain.append(full)
        try:
            done = self.node(raw, full)
        finally:
            self._chain.pop()
        if step and isinstance(done, Scalar) and done.broken:
            raise _Failed
        return done

    def _fail(self, node: Scalar, path: Path_, message: str, remedy: str, code: str = "syntax") -> Never:
        self.found.append(Diagnostic.at(node.place, code, dotted(path), message, remedy))
        raise _Failed


def _broken(node: Scalar) -> Scalar:
    return Scalar(node.value, node.place, node.text, node.plain, node.folder, broken=True)


def _kind(node: Node) -> str:
    return "a mapping" if isinstance(node, MapNode) else "a list"
