"""Plan files: a routing as JSON that other programs can judge and run.

`placement` has the workers of each stage, `paths` the workers that each microbatch visits, `order` what each worker
does: ["F" | "L" | "B", microbatch], strictly in turn. Microbatches ascend, for a reader without `order` hands them
to their origins as they are listed.
"""

from client.planning.account import holders_of, placed_ops, visited
from skein.plan.route.problem import Problem, Routing


def plan_document(
    problem: Problem, routing: Routing, *, predicted_s: float, lower_bound_s: float | None
) -> dict[str, object]:
    """A plan file's content.

    Args:
        problem: what was planned.
        routing: the plan.
        predicted_s: seconds of its step, as the instance's rules count them.
        lower_bound_s: no plan is faster; None if unknown.
    """
    order: dict[str, list[list[str | int]]] = {str(worker): [] for worker in range(problem.num_workers)}
    for op in placed_ops(problem, routing):
        order[str(op.worker)].append([op.kind.row.letter, op.microbatch])
    return {
        "instance": problem.name,
        "placement": [holders_of(problem, routing, stage) for stage in range(problem.num_stages)],
        "paths": [
            {
                "microbatch": microbatch,
                "hops": routing.worker_of[chunks].tolist(),
                "stages": problem.stage_of[chunks].tolist(),
            }
            for microbatch, chunks in enumerate(visited(problem, routing))
        ],
        "order": order,
        "predicted_s": predicted_s,
        "lower_bound_s": lower_bound_s,
    }
