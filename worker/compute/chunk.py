"""One stage as this worker holds it: parameters, accumulators, optimizer state and version.

Accumulators are the `.grad` of every parameter, as views into one flat vector per reduction group, so that a reduction
reads contiguous memory and copies nothing that it does not send. They are unnormalised sums, and zeroed, never freed.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Self

import torch
from torch import Tensor

from skein.config.job import JobSpec
from skein.config.optimizer import AdamWSpec, OptimizerSpec
from skein.errors import LocalError
from skein.model.layers import tied_names
from skein.model.parameters import layer_parameters
from skein.numeric.gradients import unflatten
from skein.numeric.optim import adamw
from skein.plan.plan import Group
from skein.protocol.messages import Decision, StepRecord
from skein.types import ChunkRef, GroupId, StageIndex, StageSpec, Step, WorkerId
from worker.model.stage import Stage, build_stage

TIED = GroupId("tied")
STEP = "step"
"""Under this name the count of updates travels with the tensors of a chunk's state."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


def own_group(stage: StageIndex) -> GroupId:
    """The group that reduces what only `stage` holds."""
    return GroupId(f"s{stage}")


def optimizer_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names of the optimizer's tensors for parameters called `names`, sorted, without `STEP`."""
    return tuple(sorted(f"{moment}.{name}" for name in names for moment in _MOMENTS))


def parameter_names(state: Iterable[str]) -> frozenset[str]:
    """Which names of a state are parameters'."""
    moments = tuple(f"{moment}." for moment in _MOMENTS)
    return frozenset(name for name in state if name != STEP and not name.startswith(moments))


def state_names(job: JobSpec, stage: StageSpec) -> frozenset[str]:
    """Names of all tensors in the state of `stage`."""
    layers = layer_parameters(job.model)[stage.first : stage.stop]
    names = frozenset(name for layer in layers for name in layer)
    return names | {*optimizer_names(names), STEP}


class Chunk:
    """A stage's module with all that belongs to it. Only the torch thread touches it."""

    def __init__(self, module: Stage, *, version: Step) -> None:
        self.module = module
        self.version = version
        self.params: dict[str, torch.nn.Parameter] = dict(module.named_parameters())
        self.optimizer = adamw.init({name: param.detach() for name, param in self.params.items()})
        self._accumulators: dict[GroupId, Tensor] = {}
        self._names: dict[GroupId, tuple[str, ...]] = {}

    @classmethod
    def drawn(cls, job: JobSpec, stage: StageSpec, *, version: Step, device: torch.device) -> Self:
        """The stage as the job's seed draws it."""
        module = build_stage(
            job.model,
            stage,
            sequence_tokens=job.data.sequence_tokens,
            seed=job.seed,
            precision=job.precision,
            device=device,
        )
        return cls(module, version=version)

    @property
    def stage(self) -> StageSpec:
        return self.module.stage

    def lay_out(self, groups: Iterable[Group], worker: WorkerId) -> None:
        """Gives every parameter a zero accumulator in the vector of its group: `tied` where `groups` says so."""
        me = ChunkRef(stage=self.stage.index, worker=worker)
        is_shared = any(group.group == TIED and me in group.members for group in groups)
        shared = tied_names(self.module.spec) & self.params.keys() if is_shared else frozenset()
        own = self.params.keys() - shared
        self._names = {own_group(self.stage.index): tuple(sorted(own)), TIED: tuple(sorted(shared))}
        self._accumulators = {group: self._laid_out(group) for group in self._names}

    def _laid_out(self, group: GroupId) -> Tensor:
        params = self._params_of(group)
        flat = next(iter(self.params.values())).new_zeros(sum(param.numel() for param in params.values()))
        if params:
            for name, view in unflatten(flat, params).items():
                self.params[name].grad = view
        return flat

    def _params_of(self, group: GroupId) -> dict[str, Tensor]:
        return {name: self.params[name].detach() for name in self._names[group]}

    @property
    def groups(self) -> tuple[GroupId, ...]:
        """The groups that reduce any parameter of this stage."""
        return tuple(group for group, names in self._names.items() if names)

    def accumulator(self, group: GroupId) -> Tensor:
        """The sums of the parameters that `group` reduces, as one vector; empty if there are none here."""
        return self._accumulators[group]

    def clear(self) -> None:
        """Empty accumulators."""
        for flat in self._accumulators.values():
            flat.zero_()

    def apply(
        self, record: StepRecord, result_by_group: Mapping[GroupId, Tensor], optimizer: OptimizerSpec
    ) -> None:
        """Turns version t into t + 1 with the numbers in `record`. Accumulators are left to the caller.

        A stage that no microbatch visited stays as it is, moments included.
        """
        weight = self._weight(record)
        if record.decision is Decision.APPLY and weight:
            self._update(record, weight, result_by_group, optimizer)
        self.version = Step(record.step + 1)

    def _weight(self, record: StepRecord) -> float:
        """The factor on this stage's sums. What is tied is held at the ends of every path, so it has the same."""
        weights = {x.weight for x in record.results if self._names.get(x.group)}
        if len(weights) > 1:
            raise LocalError(f"stage {self.stage.index}: its groups have weights {sorted(weights)}")
        return weights.pop() if weights else 0.0

    def _update(
        self,
        record: StepRecord,
        weight: float,
        result_by_group: Mapping[GroupId, Tensor],
        optimizer: OptimizerSpec,
    ) -> None:
        params = {name: param.detach() for name, param in self.params.items()}
        grads: dict[str, Tensor] = {}
        for group, names in self._names.items():
            if names:
                grads |= unflatten(result_by_group[group], self._params_of(group))
        assert isinstance(optimizer, AdamWSpec)
        self.optimizer = adamw.update(
            params,
            grads,
            self.optimizer,
            learning_rate=record.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            decayed=adamw.decayed_names(params),
            gradient_scale=weight * record.clip,
        )

    # --- state, as it travels and is saved ---

    def state(self) -> dict[str, Tensor]:
        """Parameters, optimizer tensors (`exp_avg.<name>` and so on) and `STEP` as they are until the next update."""
        state = {name: param.detach() for name, param in self.params.items()}
        for moment, tensors in self._moments().items():
            state |= {f"{moment}.{name}": tensor for name, tensor in tensors.items()}
        state[STEP] = torch.tensor(self.optimizer.step, dtype=torch.int64)
        return state

    def copy_state(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Copies of the `state` in host memory; only of `names`, if given."""
        return {name: _copied(x) for name, x in self.state().items() if names is None or name in names}

    def copy_for_checkpoint(self) -> dict[str, Tensor]:
        """As `copy_state`, without what the first stage saves too."""
        elsewhere = tied_names(self.module.spec) if self.stage.first > 0 else frozenset()
        left_out = elsewhere | set(optimizer_names(elsewhere))
        return {name: tensor for name, tensor in self.copy_state().items() if name not in left_out}

    def _moments(self) -> dict[str, dict[str, Tensor]]:
        return {"exp_avg": self.optimizer.exp_avg, "exp_avg_sq": self.optimizer.exp_avg_sq}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor], *, version: Step) -> None:
        """Takes over a state that `copy_state` made, or several with more tensors than this stage has.

        Raises:
            LocalError: a tensor is missing or of another shape; nothing has changed then.
        """
        targets: dict[str, Tensor] = {name: param.detach() for name, param in self.params.items()}
        for moment, tensors in self._moments().items():
            targets |= {f"{moment}.{name}": tensor for name, tensor in tensors.items()}
        for name, target in targets.items():
            if name not in state or state[name].shape != target.shape:
                found = tuple(state[name].shape) if name in state else "nothing"
                raise LocalError(
                    f"stage {self.stage.index}: {name} should be {tuple(target.shape)}, found {found}"
                )
        if STEP not in state:
            raise LocalError(f"stage {self.stage.index}: the state says not how many updates were made")
        for name, target in targets.items():
            target.copy_(state[name])
        self.optimizer = adamw.AdamWState(
            step=int(state[STEP]), exp_avg=self.optimizer.exp_avg, exp_avg_sq=self.optimizer.exp_avg_sq
        )
        self.version = version


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
