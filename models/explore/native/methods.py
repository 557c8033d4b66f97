"""Methods of lists, dictionaries, sets and bytes."""

from __future__ import annotations

from mypy.nodes import CallExpr, GeneratorExpr

from kvproof.models.explore.native.builtin_functions import Builtins
from kvproof.models.explore.native.codes import Code
from kvproof.models.explore.native.kinds import BYTES, INT, NONE, Kind, nullable


class Methods(Builtins):
    """Adds methods of what Python brings with it."""

    def builtin_method(self, node: CallExpr, base: Code, name: str, want: Kind | None) -> Code:
        kind = base.kind
        if kind == BYTES:
            return self._bytes_method(node, base, name)
        match kind.name:
            case "list":
                return self._list_method(node, base, name)
            case "dict":
                return self._dict_method(node, base, name)
            case "set":
                return self._set_method(node, base, name)
        raise self.fail(node, f"the method {name} of a {kind.name}")

    def _invoke(self, node: CallExpr, base: Code, how: str, wants: tuple[Kind, ...], returns: Kind) -> Code:
        """``base.how(arguments)``, evaluated in order. It may change something."""
        parts = [base, *(self.value(argument, want) for argument, want in zip(node.args, wants, strict=True))]
        code = self.ordered(parts, lambda c: f"{c[0]}->{how}({', '.join(c[1:])})")
        return Code(code, returns, False)

    def _bytes_method(self, node: CallExpr, base: Code, name: str) -> Code:
        if name == "append" and len(node.args) == 1:
            value = self.value(node.args[0], INT)
            code = self.ordered([base, value], lambda c: f"{c[0]}->append(byte_of({c[1]}))")
            return Code(code, NONE, False)
        raise self.fail(node, f"the method {name} of bytes")

    def _list_method(self, node: CallExpr, base: Code, name: str) -> Code:
        part, count = base.kind.part, len(node.args)
        match name, count:
            case "append" | "remove", 1:
                return self._invoke(node, base, name, (part,), NONE)
            case "insert", 2:
                return self._invoke(node, base, name, (INT, part), NONE)
            case "extend", 1:
                return self._invoke(node, base, name, (base.kind,), NONE)
            case "index", 1:
                return self._invoke(node, base, name, (part,), INT)
            case "pop", 1:
                return self._invoke(node, base, name, (INT,), part)
            case "pop", 0:
                return Code(f"{base.code}->pop(-1)", part, False)
            case "copy", 0:
                return Code(f"{base.code}->copy()", base.kind, base.pure)
            case "sort", _:
                keywords = {key: value for key, value in zip(node.arg_names, node.args, strict=True) if key is not None}
                return Code(f"{base.code}->sort({self.sort_key(node, keywords, base.kind)})", NONE, False)
        raise self.fail(node, f"the method {name} of a list")

    def _dict_method(self, node: CallExpr, base: Code, name: str) -> Code:
        key, value = base.kind.parts
        match name, len(node.args):
            case "get", 1:
                whole = nullable(value)
                if whole.name == "opt":
                    raise self.fail(node, "get of a tuple, or None")
                none = "NONE" if whole.name == "maybe" else "nullptr"
                inner = self.value(node.args[0], key)
                if whole.name == "maybe" and value.name == "bool":
                    raise self.fail(node, "get of a truth, or None")
                code = self.ordered([base, inner], lambda c: f"{c[0]}->get({c[1]}, {none})")
                return Code(code, whole, base.pure and inner.pure)
            case "get", 2:
                parts = [base, self.value(node.args[0], key), self.value(node.args[1], value)]
                code = self.ordered(parts, lambda c: f"{c[0]}->get({c[1]}, {c[2]})")
                return Code(code, value, all(part.pure for part in parts))
            case "setdefault", 2:
                return self._invoke(node, base, "setdefault", (key, value), value)
            case "pop", 2 if self.known(node.args[1]) is None:
                inner = self.value(node.args[0], key)
                return Code(self.ordered([base, inner], lambda c: f"(void){c[0]}->drop({c[1]})"), NONE, False)
            case "copy", 0:
                return Code(f"{base.code}->copy()", base.kind, base.pure)
        raise self.fail(node, f"the method {name} of a dictionary")

    def _set_method(self, node: CallExpr, base: Code, name: str) -> Code:
        match name, len(node.args):
            case "add", 1:
                return self._invoke(node, base, "add", (base.kind.part,), NONE)
            case "update", 1:
                argument = node.args[0]
                part = base.kind.part
                if isinstance(argument, GeneratorExpr):
                    held = self.fresh("u")
                    lines = self.loop(
                        argument, lambda item: [f"{held}->add({self.convert(argument, item, part).code});"]
                    )
                    return Code(f"({{ auto* {held} = {base.code}; {' '.join(lines)} }})", NONE, False)
                found = self.expression(argument)
                if found.kind.name in ("list", "set"):
                    return Code(self.ordered([base, found], lambda c: f"{c[0]}->update({c[1]})"), NONE, False)
        raise self.fail(node, f"the method {name} of a set")
