"""The course of a worker in words: lines for its log, and names of moments for a program that embeds it."""

import logging

from skein.protocol.messages.directives import Assign, Directive, Dismiss, NewGeneration, Refused, Welcome
from skein.protocol.messages.reports import Report, Suspected, Trouble
from skein.protocol.messages.tensors import Envelope, HopTensor
from skein.protocol.worker.ops import Op
from skein.protocol.worker.worker_io import (
    DirectiveArrived,
    OpEnded,
    PrefetchEnded,
    PrefetchFailed,
    RunOp,
    SendReport,
    SendTensor,
    StartPrefetch,
    TensorArrived,
    TensorTaken,
    WorkerCommand,
    WorkerEvent,
)

_log = logging.getLogger(__name__)


def unwatched(_: str) -> None:
    """Drop a moment that nobody wants to know."""


def named_moment(happening: WorkerCommand | WorkerEvent) -> str:
    """A command or an event, with what matters of it.

    >>> from skein.protocol.messages.directives import Dismiss
    >>> from skein.protocol.messages.reports import Leaving
    >>> from skein.protocol.worker.worker_io import CancelBuild
    >>> from skein.types import Epoch
    >>> named_moment(SendReport(report=Leaving(reason="")))
    'SendReport Leaving'
    >>> named_moment(DirectiveArrived(directive=Dismiss(epoch=Epoch(1), job=None, may_exit=False)))
    'DirectiveArrived Dismiss'
    >>> named_moment(CancelBuild())
    'CancelBuild'
    """
    name = type(happening).__name__
    match happening:
        case SendReport():
            return f"{name} {type(happening.report).__name__}"
        case DirectiveArrived(directive=Assign(resumption=resumption)):
            return f"{name} Assign" if resumption is None else f"{name} Assign resumed"
        case DirectiveArrived():
            return f"{name} {type(happening.directive).__name__}"
        case RunOp() | OpEnded():
            return f"{name} {op_named(happening.op)}"
        case SendTensor() | TensorArrived() | TensorTaken():
            return f"{name} {_tensor_named(happening.envelope)}"
        case StartPrefetch():
            return f"{name} {'backup' if happening.prefetch.is_backup else 'followed'}"
        case PrefetchEnded() | PrefetchFailed():
            return f"{name} {happening.kind}"
        case _:
            return name


def op_named(op: Op) -> str:
    """An op's kind."""
    return type(op).__name__.removesuffix("Op")


def _tensor_named(envelope: Envelope) -> str:
    header = envelope.header
    return header.direction if isinstance(header, HopTensor) else header.kind


def tell_directive(directive: Directive) -> None:
    """A line for what changes the course of things."""
    match directive:
        case Welcome():
            _log.info("welcomed epoch=%d lease=%.1f s", directive.epoch, directive.lease_s)
        case NewGeneration():
            _log.info("generation=%d job=%s", directive.generation, directive.job)
        case Dismiss(job=None):
            _log.info("dismissed: free for other work" + (", may exit" if directive.may_exit else ""))
        case Dismiss():
            _log.info("dismissed job=%s", directive.job)
        case Refused(log=None):
            _log.error("refused: %s", directive.reason)
        case _:
            pass


def tell_report(report: Report) -> None:
    """A line for what this worker complains about."""
    match report:
        case Suspected():
            _log.warning("generation=%d suspect peer=%s: %s", report.generation, report.peer, report.reason)
        case Trouble():
            _log.warning("generation=%d trouble: %s", report.generation, report.reason)
        case _:
            pass
