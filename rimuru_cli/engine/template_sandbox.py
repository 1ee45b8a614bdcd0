"""The Jinja environment that chat templates run in.

A template is code from whoever uploaded the checkpoint. Jinja's sandbox keeps it away from Python's internals; what it does not stop are
templates that never end or that grow until memory is full. Here every step is paid from a `Budget`:

- the syntax tree is rewritten so that each loop iteration and macro call pays, with the text it contains;
- filters, tests, calls and operators pay for their arguments and results;
- what one step could make large at once (repetition, padding, powers, nested lists doubled again and again) is measured before it runs.

For templates within the budget the output equals that of transformers' environment: ImmutableSandboxedEnvironment with trim_blocks and
lstrip_blocks, loop controls, the `generation` tag, `tojson`, `raise_exception` and `strftime_now`. Two things differ on purpose:
reading an underscore attribute is an error even when nothing is done with it, and `lipsum` (random text) does not exist.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable
from datetime import datetime
from string import Formatter
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from rimuru_cli.engine.template_budget import MAX_PADDING, STEP, Budget, TemplateLimitError
from rimuru_cli.engine.template_checks import check_binop, check_filter, check_method


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# These look only at the outside of what they get, or hand items on one by one to filters that pay for themselves.
_SHALLOW_FILTERS = _words(
    "abs attr batch count d default first items last length list map reject rejectattr reverse select selectattr slice"
)
_SHALLOW_TESTS = _words("boolean callable defined false float integer iterable mapping none number sequence string true undefined")
# Python loops or regular expressions inside that are worse than linear, or results much larger than their arguments.
_SLOW_FILTERS = _words(
    "batch center filesizeformat groupby pprint round slice striptags sum title truncate urlencode urlize wordcount wordwrap xmlattr"
)
_SLOW_UNITS = 100_000
_EAGER_FILTERS = _words("groupby join max min sort sum unique")  # they use all of a generator anyway


class TemplateRefusalError(TemplateError):
    """The template called raise_exception: it does not accept this conversation."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; when rendering it changes only the scope of variables."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: Parser) -> nodes.Node:
        """Wrap the body in a call, as transformers does."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_call"), [], [], body).set_lineno(line)

    def _call(self, caller: Callable[[], str]) -> str:
        return caller()


class _Meter(NodeTransformer):
    """Puts payments into the syntax tree: `tick` at the head of repeated bodies, `measure` around values used as a whole."""

    def _call(self, name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)
        call.set_lineno(line)
        return call

    def _body(self, node: Any) -> Any:
        chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        tick = nodes.ExprStmt(self._call("tick", [nodes.Const(STEP + chars)], node.lineno)).set_lineno(node.lineno)
        node.body = [tick, *node.body]
        return node

    visit_For = visit_Macro = visit_CallBlock = _body

    def _literal(self, node: Any) -> Any:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else self._call("measure", [node], node.lineno)

    visit_List = visit_Tuple = visit_Dict = _literal

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Slices copy."""
        self.generic_visit(node)
        return self._call("measure", [node], node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """`a ~ b` turns both into text."""
        self.generic_visit(node)
        node.nodes = [self._call("measure", [n], n.lineno) for n in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """`==` and `in` look at everything inside."""
        self.generic_visit(node)
        node.expr = self._call("measure", [node.expr], node.lineno)
        for operand in node.ops:
            operand.expr = self._call("measure", [operand.expr], node.lineno)
        return node


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """See the module. `budget` is replaced before every rendering; one rendering at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        # Bound once, so that `call` can recognise them by identity.
        self.tick = self._tick
        self.measure = self._measure
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=self._finalize)
        self.filters["tojson"] = _tojson
        self.filters = {name: self._paid_filter(name, f) for name, f in self.filters.items()}
        self.tests = {name: self._paid_test(name, f) for name, f in dict[str, Any](self.tests).items()}
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        del self.globals["lipsum"]

    def metered(self, source: str) -> nodes.Template:
        """Syntax tree of `source` with payments in it. Raises TemplateSyntaxError."""
        tree = _Meter().visit(self.parse(source))
        assert isinstance(tree, nodes.Template)
        return tree

    def _tick(self, units: int) -> str:
        self.budget.spend(units)
        return ""

    def _measure(self, value: Any) -> Any:
        self.budget.measure(value)
        return value

    def _finalize(self, value: Any) -> Any:
        self.budget.measure(value)
        return value

    # ---- calls and attributes

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `__obj` from a template; the odd names keep clear of the template's keywords."""
        if __obj is __self.tick or __obj is __self.measure:
            return __obj(*args)
        budget = __self.budget
        budget.spend(STEP)
        if not isinstance(__obj, Macro) and __obj is not Namespace:
            args = tuple(budget.drain(a) if isinstance(a, types.GeneratorType) else a for a in args)
            budget.measure(args)
            for name, value in kwargs.items():
                if name not in ("_loop_vars", "_block_vars"):  # Jinja's own
                    budget.measure(value)
            owner = getattr(__obj, "__self__", None)
            if owner is not None and not isinstance(owner, types.ModuleType):
                check_method(budget, owner, getattr(__obj, "__name__", ""), args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        budget.spend_shallow(result)
        return result

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]` of a template."""
        if isinstance(argument, tuple):  # hashing walks nested tuples
            self.budget.measure(argument)
        return super().getitem(obj, argument)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Underscore attributes raise; Jinja alone would print nothing for them."""
        if attribute.startswith("_"):
            raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe.")
        return super().unsafe_undefined(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format and str.format_map with the sandbox's rules and the budget; None for any other value."""
        if super().wrap_str_format(value) is None:
            return None
        text, is_map = value.__self__, value.__name__ == "format_map"
        if isinstance(text, Markup):
            raise SecurityError("format() of escaped text is not supported in chat templates.")
        formatter = _PaidFormatter(self)

        def wrapped(*args: Any, **kwargs: Any) -> str:
            if is_map:
                (kwargs,), args = args, ()
            return formatter.vformat(text, args, kwargs)

        return wrapped

    # ---- operators

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """One of the intercepted operators."""
        budget = self.budget
        budget.spend(STEP)
        check_binop(budget, operator, left, right)
        result = super().call_binop(context, operator, left, right)
        budget.spend_shallow(result)
        return result

    # ---- filters and tests

    def _paid_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # environment or context comes first

        def paid(*args: Any, **kwargs: Any) -> Any:
            budget = self.budget
            budget.spend(STEP)
            head, values = args[:passed], args[passed:]
            if name in _EAGER_FILTERS and values and isinstance(values[0], types.GeneratorType):
                values = (budget.drain(values[0]), *values[1:])
            if name not in _SHALLOW_FILTERS:
                units = budget.measure(values) + budget.measure(kwargs)
                if name in _SLOW_FILTERS and units > _SLOW_UNITS:
                    raise TemplateLimitError(f"it gives the filter {name!r} too much text")
            if name in _SLOW_FILTERS and any(isinstance(v, int) and abs(v) > MAX_PADDING for v in (*values[1:], *kwargs.values())):
                raise TemplateLimitError(f"it gives the filter {name!r} too large a number")
            check_filter(budget, name, values, kwargs)
            result = function(*head, *values, **kwargs)
            budget.spend_shallow(result)
            return result

        # Jinja decides by this attribute whether to pass the environment or the context.
        paid.__dict__.update(getattr(function, "__dict__", {}))
        return paid

    def _paid_test(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        shallow = name in _SHALLOW_TESTS

        def paid(*args: Any, **kwargs: Any) -> Any:
            self.budget.spend(STEP)
            if not shallow:
                self.budget.measure(args)
            return function(*args, **kwargs)

        paid.__dict__.update(getattr(function, "__dict__", {}))
        return paid


class _PaidFormatter(SandboxedFormatter):
    """str.format with the sandbox's attribute rules, paying field by field."""

    def __init__(self, env: ChatEnvironment) -> None:
        super().__init__(env)
        self._budget = env.budget

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._budget.measure(value)
        return Formatter.convert_field(self, value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        if any(int(n[:9]) > MAX_PADDING for n in re.findall(r"\d+", format_spec)):
            raise TemplateLimitError("it pads text to too large a width")
        self._budget.measure(value)
        result = Formatter.format_field(self, value, format_spec)
        self._budget.spend_shallow(result)
        return result


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateRefusalError(str(message))


def _strftime_now(format: str) -> str:
    # glibc takes a width ("%999999999Y"); no template needs one.
    if len(format) > 1000 or re.search(r"%[^A-Za-z%]*\d", format):
        raise TemplateLimitError("its date format is too wide")
    return datetime.now().strftime(format)
