"""Evaluations that a worker was asked for: when they begin, and what is told of their end.

A selection begins at its version, and goes on beside steps until rows are chosen. Parameters of that version are kept
till then, whatever generations come, so that under another one it may begin anew.
"""

from skein.protocol.messages.directives import Assign, ChunkVersion, Evaluate, SourceKind
from skein.protocol.messages.reports import EvaluationDone
from skein.protocol.messages.tensors import Phase
from skein.protocol.worker.pipeline import Pipeline, evaluation_origins
from skein.protocol.worker.standing import Standing
from skein.protocol.worker.worker_io import KeepParameters, PickCandidates
from skein.types import StageIndex, Step


class Evaluations:
    """The evaluation and the selection that go on; commands go to `standing`."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._to_look: Evaluate | None = None
        """A selection that is to begin at a version which is not here yet."""
        self._going_on: dict[bool, Evaluate] = {}
        """By whether it outlasts steps."""
        self._reported: set[tuple[Phase, StageIndex]] = set()
        self.kept: tuple[ChunkVersion, ...] = ()
        """Parameters that are kept for a selection, once steps have changed them."""

    def stop(self) -> None:
        """Forget what the older generation asked for."""
        self._to_look = None
        self._going_on.clear()
        self._reported.clear()

    def forget(self) -> None:
        """The job is over: nothing is kept."""
        self.kept = ()

    def hold(self, assign: Assign) -> None:
        """Chunks that stay where they are keep their copies; those that others give come without."""
        given = {x.stage for x in assign.chunks if x.source.kind is not SourceKind.KEEP}
        self.kept = tuple(x for x in self.kept if x.stage not in given and x.version < assign.version)

    def want(self, selection: Evaluate) -> None:
        """Begin a selection once its version is here, or at once where that is kept."""
        self._to_look = selection

    def is_to_look(self, version: Step) -> bool:
        """Whether a selection is to begin now."""
        return self._to_look is not None and self._to_look.version <= version

    def look(self, pipeline: Pipeline, assign: Assign, version: Step) -> None:
        """Begin the selection that is wanted, chunks being at `version`."""
        asked, self._to_look = self._to_look, None
        assert asked is not None
        if asked.version == version:
            self._standing.commands.append(KeepParameters(version=version))
            self.kept = tuple(ChunkVersion(stage=x.stage, version=version) for x in assign.chunks)
        self.begin(asked, pipeline, assign)

    def begin(self, asked: Evaluate, pipeline: Pipeline, assign: Assign) -> None:
        """Begin what was asked for."""
        self._reported = {about for about in self._reported if about[0] is not asked.phase}
        self._going_on[asked.phase.outlasts_steps] = asked
        pipeline.begin(asked.phase, evaluation_origins(assign, asked), asked.version)
        self.report(asked.phase, pipeline, assign)

    def committed(self) -> None:
        """A step is applied: evaluations of the version before are over."""
        self._going_on.pop(False, None)
        self._reported = {about for about in self._reported if about[0].outlasts_steps}

    def selected(self, pipeline: Pipeline | None) -> None:
        """Rows are chosen: no selection goes on any longer."""
        self._to_look = None
        self.kept = ()
        self._going_on.pop(True, None)
        if pipeline is not None:
            pipeline.selected()

    def report(self, phase: Phase, pipeline: Pipeline, assign: Assign) -> None:
        """Report each head here whose microbatches all have their loss; of a selection, pick of its rows."""
        asked = self._going_on.get(phase.outlasts_steps)
        if asked is None:
            return
        for stage in (chunk.stage.index for chunk in assign.chunks):
            num_scored = len(pipeline.evaluation_loss(stage, asked.phase)[0])
            expected = pipeline.expected_evaluations(stage, asked, assign.num_evaluation_paths)
            reported = (asked.phase, stage)
            if num_scored and num_scored >= expected and reported not in self._reported:
                self._reported.add(reported)
                self._tell(asked, stage, pipeline)

    def _tell(self, asked: Evaluate, stage: StageIndex, pipeline: Pipeline) -> None:
        generation = self._standing.generation
        if asked.phase.selects:
            self._standing.commands.append(
                PickCandidates(generation=generation, version=asked.version, num_rows=asked.num_rows)
            )
            return
        microbatches, loss = pipeline.evaluation_loss(stage, asked.phase)
        self._standing.tell(
            EvaluationDone(
                generation=generation,
                version=asked.version,
                microbatches=microbatches,
                loss_sum=loss.loss_sum,
                num_tokens=loss.num_tokens,
                phase=asked.phase,
                digest=loss.digest,
                rows=loss.rows,
            )
        )
