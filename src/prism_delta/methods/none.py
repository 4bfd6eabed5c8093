"""The other control: no edit at all."""

from __future__ import annotations

from ..moments import Moments
from ..plan import Plan
from .base import Method, MethodParams


class NoSteering(Method):
    name = "none"
    title = "control: the plain model"
    needs = "nothing"
    steers = "nothing"
    order = 9

    def make_plan(self, moments: Moments, params: MethodParams) -> Plan:
        return Plan({}, {place: moments[place].shape for place in moments})


METHODS = (NoSteering(),)
