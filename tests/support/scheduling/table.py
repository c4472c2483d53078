"""The schedule of a name."""

from skein.errors import UserError
from skein.plan.route.schedules.named import NAMED_ORDERS
from skein.plan.route.schedules.shape import Shape
from tests.support.scheduling.ops import PipelineSchedule, schedule_of


def make_schedule(name: str, shape: Shape) -> PipelineSchedule:
    """The schedule called `name`.

    Raises:
        UserError: there is none of that name, or it cannot do this shape.
    """
    if name not in NAMED_ORDERS:
        raise UserError("schedule", name, f"give one of {', '.join(NAMED_ORDERS)}")
    generator = NAMED_ORDERS[name]
    if not generator.does(shape.num_chunks, shape.placement):
        wanted = generator.num_chunks or "at least 2"
        hint = f"{name} is for {wanted} chunks per worker placed as a {generator.placement}"
        raise UserError("num_chunks", shape.num_chunks, hint)
    return schedule_of(shape, generator.make(shape))
