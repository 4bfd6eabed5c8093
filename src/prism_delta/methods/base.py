"""What a method is: a name, typed parameters, and algebra from Moments to a Plan."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from .. import __version__
from ..errors import ParameterError
from ..moments import Moments
from ..plan import Plan
from ..suggest import did_you_mean


@dataclass(frozen=True)
class MethodParams:
    """Base of parameter sets; every field carries a `help` text that the CLI and the docs print."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            object.__setattr__(self, name, _coerce(name, getattr(self, name), kind))


def param(default: Any, help: str) -> Any:
    """A parameter field."""
    return dataclasses.field(default=default, metadata={"help": help})


class Method(ABC):
    """A way to highlight. Subclasses give the facts below and `make_plan`."""

    name: ClassVar[str]
    title: ClassVar[str]
    params_type: ClassVar[type[MethodParams]] = MethodParams
    needs: ClassVar[str] = "moments"
    steers: ClassVar[str] = "keys"
    projection: ClassVar[str] = "none"
    head_selection: ClassVar[str] = "none"
    fused_attention: ClassVar[bool] = True
    order: ClassVar[int] = 50

    def params(self, **values: Any) -> MethodParams:
        """Checked parameters, defaults filled in."""
        known = [field.name for field in dataclasses.fields(self.params_type)]
        for name in values:
            if name not in known:
                raise ParameterError(
                    f"{self.name} has no parameter {name!r}{did_you_mean(name, known)}; "
                    f"it has {', '.join(known) or 'none'}"
                )
        return self.params_type(**values)

    def plan(self, moments: Moments, **values: Any) -> Plan:
        """Moments to Plan, by linear algebra alone."""
        params = self.params(**values)
        moments.check_finite()
        plan = self.make_plan(moments, params)
        header = {
            "method": self.name,
            "params": dataclasses.asdict(params),
            **{key: moments.header[key] for key in ("model", "tokenizer", "pairs", "options") if key in moments.header},
            "rows": moments.count,
            "version": __version__,
        }
        return dataclasses.replace(plan, header=header)

    @abstractmethod
    def make_plan(self, moments: Moments, params: Any) -> Plan:
        """The algebra of this method."""


def _coerce(name: str, value: Any, kind: Any) -> Any:
    """The value as its declared type; strings come from the command line."""
    choices = get_args(kind)
    if get_origin(kind) is Literal:
        if value not in choices:
            raise ParameterError(f"{name} must be one of {', '.join(map(str, choices))}, found {value!r}")
        return value
    if type(None) in choices:  # X | None
        if value is None or (value in ("none", "None") and "none" not in get_args(choices[0])):
            return None
        return _coerce(name, value, choices[0])
    if kind is float:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if isinstance(value, bool) or not math.isfinite(number):
            raise ParameterError(f"{name} must be a finite number, found {value!r}")
        return number
    if kind is str and not isinstance(value, str):
        raise ParameterError(f"{name} must be text, found {value!r}")
    return value


def parse_settings(settings: list[str]) -> Mapping[str, str]:
    """`key=value` words of a command line."""
    found: dict[str, str] = {}
    for item in settings:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ParameterError(f"expected key=value, found {item!r}")
        found[name.strip().replace("-", "_")] = value.strip()
    return found
