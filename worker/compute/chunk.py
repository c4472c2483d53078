"""Chunk: a stage as this worker holds it, with its walker's tensors, accumulators and version.

Accumulators are the `.grad` of every parameter, as views into one flat vector per reduction group, so that a reduction
reads contiguous memory and copies nothing that it does not send. They are unnormalised sums, and zeroed, never freed.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor

from skein.config.job import JobSpec
from skein.config.rule import Walkers
from skein.errors import LocalError
from skein.model.layers import names_before
from skein.model.reduced import names_by_group
from skein.numeric.aggregate.rule import Rule, Terms
from skein.numeric.aggregate.rules import rule_of
from skein.numeric.gradients import unflatten
from skein.numeric.walker import Walker
from skein.plan.plan import Group
from skein.protocol.messages.directives import Decision, StepRecord
from skein.protocol.worker.ops import Loss, LossInputOp, LossOp
from skein.types import ChunkRef, GroupId, Own, StageSpec, Step, WorkerId
from worker.compute.batches import BatchReader
from worker.compute.state import STEP, by_name, copied, named_tensors, saved
from worker.mesh.mesh import Mesh
from worker.mesh.stage import MeshStage
from worker.model.stage import Stage, build_stage
from worker.selection.traits import Traits


def update(
    rule: Rule, walker: Walker, grads: Mapping[str, Tensor], record: StepRecord, *, weight: float
) -> None:
    """Apply a committed step without an exchange to a walker, in place, wherever its tensors lie.

    Args:
        grads: sums over microbatches, by name of the parameter; `weight` makes means of them.
    """
    terms = Terms(step=record.step, learning_rate=record.learning_rate, gradient_scale=weight * record.clip)
    rule.local_step(walker, grads, terms, talks=False)


class Chunk:
    """A stage's module with all that belongs to it. Only the torch thread touches it.

    `shared`: computes the module's functions on several devices; None: the module does.
    """

    def __init__(self, module: Stage, rule: Rule, *, version: Step, shared: MeshStage | None = None) -> None:
        self.module = module
        self.shared = shared
        self.rule = rule
        self.version = version
        self.params: dict[str, torch.nn.Parameter] = dict(module.named_parameters())
        params = {name: param.detach() for name, param in self.params.items()}
        self.walker = Walker(params=params, state=rule.init(params))
        """Its parameters are the module's own memory."""
        self._accumulators: dict[GroupId, Tensor] = {}
        self._names: dict[GroupId, tuple[str, ...]] = {}
        self._kept_elsewhere: frozenset[str] = frozenset()
        """Parameters that another chunk here keeps, and updates."""
        self._place: tuple[int, int] | None = None
        """Among how many members of the stage's group, and as the how-manieth."""
        self._members: tuple[ChunkRef, ...] = ()
        self._kept: tuple[Step, dict[str, Tensor]] | None = None
        """Parameters of an older version, and which."""

    @classmethod
    def drawn(
        cls,
        job: JobSpec,
        stage: StageSpec,
        *,
        version: Step,
        device: torch.device,
        mesh: Mesh | None = None,
        slots: int = 1,
    ) -> Self:
        """The stage as the job's seed draws it; with a mesh, its functions are computed there, `slots` at once."""
        module = build_stage(
            job.model,
            stage,
            sequence_tokens=job.data.sequence_tokens,
            seed=job.seed,
            precision=job.precision,
            device=device,
        )
        shared = None if mesh is None else MeshStage(mesh, job, module, slots=slots)
        return cls(module, rule_of(job.aggregation, job.optimizer), version=version, shared=shared)

    @property
    def functions(self) -> Stage | MeshStage:
        """Computes what goes through the stage, and back."""
        if self.shared is None:
            return self.module
        # Those that another chunk here keeps are that one's.
        self.shared.parameters = self.walker.params
        return self.shared

    def keep_parameters(self) -> None:
        """Keep a copy of the parameters as they are, to compute with once they have changed."""
        self._kept = self.version, {name: param.detach().clone() for name, param in self.params.items()}

    def drop_kept(self) -> None:
        """Keep no copy."""
        self._kept = None

    @contextmanager
    def as_of(self, version: Step) -> Iterator[Stage | MeshStage]:
        """Computes what goes through the stage as it was at `version`: that of now, or the one that is kept.

        Raises:
            LocalError: it is neither.
        """
        if version == self.version:
            yield self.functions
            return
        if self._kept is None or self._kept[0] != version:
            raise LocalError(f"stage {self.stage.index} is at version {self.version}, not at {version}")
        now = {name: param.data for name, param in self.params.items()}
        self._set_data(self._kept[1])
        try:
            yield self.module
        finally:
            self._set_data(now)

    def _set_data(self, tensors: Mapping[str, Tensor]) -> None:
        for name, param in self.params.items():
            param.data = tensors[name]

    @property
    def stage(self) -> StageSpec:
        return self.module.stage

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters, gradients and state."""
        return next(iter(self.params.values())).dtype

    def own_loss(self, op: LossOp | LossInputOp, batches: BatchReader | None, traits: Traits) -> Loss | None:
        """Answer to an op that is a local step of rows, or scores them; None: it is a microbatch of a common sum.

        `traits`: where features are kept.
        """
        del op, batches, traits
        return None

    def lay_out(self, groups: Iterable[Group], worker: WorkerId) -> None:
        """Gives every parameter a zero accumulator in the vector of its group, of those that this chunk is in."""
        self._drop_sums()
        me = ChunkRef(stage=self.stage.index, worker=worker)
        mine = [group.group for group in groups if me in group.members]
        self._names = names_by_group(mine, me.stage, sorted(self.params), self.module.spec.layer_parameters())
        self._accumulators = {group: self._laid_out(group) for group in self._names}

    def join(self, groups: Iterable[Group], worker: WorkerId) -> None:
        """Takes its place among the members of the stage's group; what depends on who they are is begun anew."""
        me = ChunkRef(stage=self.stage.index, worker=worker)
        members = next((x.members for x in groups if x.group == Own(self.stage.index)), (me,))
        place = len(members), members.index(me)
        # Who was lost and replaced has taken with it what means over all members were made of.
        is_other = self._members not in ((), members)
        if self._place is not None and (self._place != place or is_other):
            self.rule.on_membership(self.walker, before=self._place[0], after=place[0], me=self._place[1])
        self._place, self._members = place, members

    def share(self, keepers: "Mapping[str, Chunk]") -> None:
        """Has these parameters and their state as one with the chunks that keep them; all others are its own to update.

        Holders of a version are equal bit by bit, so what was computed before is none the worse.
        """
        self._kept_elsewhere = frozenset(keepers)
        self.walker.share({name: keeper.walker for name, keeper in keepers.items()})
        for name in keepers:
            self.params[name].data = self.walker.params[name]

    def begin_with_parameters(self) -> None:
        """The parameters were replaced before the first update: all else begins with these."""
        self.walker = Walker(params=self.walker.params, state=self.rule.init(self.walker.params))

    def begin_as_newcomer(self) -> None:
        """The state is a copy of another member's: what is each member's own begins anew."""
        self.rule.on_membership(self.walker, before=0, after=0, me=None)

    def _laid_out(self, group: GroupId) -> Tensor:
        params = self._params_of(group)
        flat = next(iter(self.params.values())).new_zeros(sum(param.numel() for param in params.values()))
        if params:
            for name, view in unflatten(flat, params).items():
                self.params[name].grad = view
        return flat

    def _params_of(self, group: GroupId) -> dict[str, Tensor]:
        return {name: self.walker.params[name] for name in self._names[group]}

    @property
    def groups(self) -> tuple[GroupId, ...]:
        """The groups that reduce any parameter of this stage."""
        return tuple(group for group, names in self._names.items() if names)

    def accumulator(self, group: GroupId) -> Tensor:
        """The sums of the parameters that `group` reduces, as one vector: the stage's own where no plan lists it."""
        self._gather_sums()
        return self._accumulators.get(group, self._accumulators[Own(self.stage.index)])

    def named(self, group: GroupId, flat: Tensor) -> dict[str, Tensor]:
        """Views of a vector of `group`, by the names of the parameters that it reduces."""
        return unflatten(flat, self._params_of(group))

    def gradients(self) -> dict[str, Tensor]:
        """The sums of all parameters by name: views of the accumulators."""
        self._gather_sums()
        grads: dict[str, Tensor] = {}
        for group in self.groups:
            grads |= self.named(group, self._accumulators[group])
        return grads

    def clear(self) -> None:
        """Empty accumulators."""
        self._drop_sums()
        for flat in self._accumulators.values():
            flat.zero_()

    def _gather_sums(self) -> None:
        if self.shared is not None:
            self.shared.gather_sums()

    def _drop_sums(self) -> None:
        if self.shared is not None:
            self.shared.drop_sums()

    def apply(self, record: StepRecord, result_by_group: Mapping[GroupId, Tensor]) -> None:
        """Turns version t into t + 1 with the numbers in `record`. Accumulators are left to the caller.

        A stage that no microbatch visited stays as it is, moments included.
        """
        weight = self._weight(record)
        if record.decision is Decision.APPLY and weight:
            grads: dict[str, Tensor] = {}
            for group in self.groups:
                grads |= self.named(group, result_by_group[group])
            self._update(grads, record, weight)
        self.version = Step(record.step + 1)

    def step_alone(self, record: StepRecord, weight: float) -> None:
        """Update as `apply` does, with this chunk's own sums; at `weight` 0 nothing changes but the version."""
        if weight:
            self._update(self.gradients(), record, weight)
        self.version = Step(record.step + 1)

    def _update(self, grads: Mapping[str, Tensor], record: StepRecord, weight: float) -> None:
        """Update what no other chunk here keeps."""
        kept = self.walker.without(self._kept_elsewhere)
        own = {name: grad for name, grad in grads.items() if name in kept.params}
        update(self.rule, kept, own, record, weight=weight)
        self.walker.num_updates = kept.num_updates

    @torch.no_grad()
    def put_parameters(self, params: Mapping[str, Tensor]) -> None:
        """Compute with these from now on."""
        for name, param in self.walker.params.items():
            param.copy_(params[name])

    def take(self, walker: Walker, record: StepRecord) -> None:
        """Version t + 1 is what an exchange has made of a copy of the walker."""
        self.put_parameters(walker.params)
        self.walker.state = walker.state
        self.walker.num_updates = walker.num_updates
        self.version = Step(record.step + 1)

    def _weight(self, record: StepRecord) -> float:
        """The factor on this stage's sums. What is tied is held at the ends of every path, so it has the same."""
        weights = {x.weight for x in record.results if self._names.get(x.group)}
        if len(weights) > 1:
            raise LocalError(f"stage {self.stage.index}: its groups have weights {sorted(weights)}")
        return weights.pop() if weights else 0.0

    # --- state, as it travels and is saved ---

    def state(self) -> dict[str, Tensor]:
        """Tensors that another holder of the stage is given, by name, as they are until the next update."""
        return named_tensors(self.walker, copied(self.rule.slots))

    def copy_state(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Copies of the `state` in host memory; only of `names`, if given."""
        return {name: _copied(x) for name, x in self.state().items() if names is None or name in names}

    def copy_for_checkpoint(
        self, walkers: Walkers = Walkers.ONE
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies of the parameters and of all else that is saved, less what a stage before saves too.

        Of `MANY` walkers each saves what is its own as well.
        """
        elsewhere = names_before(self.module.spec, self.stage)
        slots = saved(self.rule.slots, walkers)
        left_out = {*elsewhere, *(f"{slot}.{name}" for slot in slots for name in elsewhere)}
        copies = {
            name: _copied(x) for name, x in named_tensors(self.walker, slots).items() if name not in left_out
        }
        return {name: copies.pop(name) for name in self.params.keys() - elsewhere}, copies

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor], *, version: Step) -> None:
        """Takes over a state that `copy_state` made, or a checkpoint's, or several with more tensors than are here.

        Slots that not every copy and every checkpoint has begin anew where `state` lacks them.

        Raises:
            LocalError: a tensor is missing or of another shape; nothing has changed then.
        """
        slots = self.rule.slots
        targets = named_tensors(self.walker, slots)
        source = {**self._anew(slots.keys() - (copied(slots) & saved(slots))), **state}
        for name, target in targets.items():
            if name not in source or source[name].shape != target.shape:
                found = tuple(source[name].shape) if name in source else "nothing"
                raise LocalError(
                    f"stage {self.stage.index}: {name} should be {tuple(target.shape)}, found {found}"
                )
        for name in targets.keys() - {STEP}:
            targets[name].copy_(source[name])
        self.walker.num_updates = int(state[STEP])
        self.version = version

    def load_walker(
        self, state: Mapping[str, Tensor], *, version: Step, walker: int, num_walkers: int
    ) -> None:
        """Load a walker as `load_state` does; one that the checkpoint of `num_walkers` lacks begins as another's copy.

        Raises:
            LocalError: as for `load_state`.
        """
        self.load_state(state, version=version)
        if walker < num_walkers:
            # `join` compares, and begins anew what depends on who the members are.
            self._place = num_walkers, walker
        else:
            self.begin_as_newcomer()

    def _anew(self, slots: Collection[str]) -> dict[str, Tensor]:
        """The state of `slots` before the first update."""
        return by_name(self.rule.init(self.walker.params), slots) if slots else {}


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
