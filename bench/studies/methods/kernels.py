"""The inner loops of the genetic search for groups of workers: matchings, tours, scores, the local pass, children.

Rules of this file
- N workers, G groups. Groups are numbered like stages; one more, the last of `sizes`, may be of idle workers.
- All loops are here, since code that was compiled for one file is not compiled anew when another one changes.

Sources: "Decentralized Training of Foundation Models in Heterogeneous Environments" (DT-FM, NeurIPS 2022), Section 4,
whose local pass takes its cycles from the literature on multiway partitioning.
"""

import numpy as np

from skein.plan.route.kernels.compiled import compiled
from skein.plan.route.problem import F64, I64


@compiled
def bottleneck(cost: F64, match: I64) -> float:
    """The least possible largest cost when every row gets a column of its own; `match` (rows,) becomes who gets which.

    Args:
        cost: (rows, columns), at least as many columns as rows.

    Row by row along the augmenting path whose largest cost is least: if the rows so far fit under a threshold, so do
    they with the next one exactly if such a path exists under it (Berge).
    """
    num_rows, num_columns = cost.shape
    row_of = np.full(num_columns, -1)
    reach = np.empty(num_columns)
    before = np.empty(num_columns, np.int64)
    is_done = np.empty(num_columns, np.bool_)
    largest = 0.0
    for new in range(num_rows):
        for column in range(num_columns):
            reach[column] = cost[new, column]
            before[column] = -1
            is_done[column] = False
        while True:
            at = -1
            for column in range(num_columns):
                if not is_done[column] and (at < 0 or reach[column] < reach[at]):
                    at = column
            is_done[at] = True
            row = row_of[at]
            if row < 0:
                break
            for column in range(num_columns):
                through = max(reach[at], cost[row, column])
                if not is_done[column] and through < reach[column]:
                    reach[column] = through
                    before[column] = at
        largest = max(largest, reach[at])
        while before[at] >= 0:
            row_of[at] = row_of[before[at]]
            at = before[at]
        row_of[at] = new
    for column in range(num_columns):
        if row_of[column] >= 0:
            match[row_of[column]] = column
    return largest


@compiled
def link_groups(hop_s: F64, group_of: I64, sizes: I64, num_stages: int) -> F64:
    """(num_stages, num_stages) bottleneck matching of `hop_s` of each two groups, the smaller one matched whole."""
    num_workers = len(group_of)
    links = np.zeros((num_stages, num_stages))
    members = np.empty((num_stages, num_workers), np.int64)
    count = np.zeros(num_stages, np.int64)
    for worker in range(num_workers):
        group = group_of[worker]
        if group < num_stages:
            members[group, count[group]] = worker
            count[group] += 1
    match = np.empty(num_workers, np.int64)
    for g in range(num_stages):
        for h in range(g + 1, num_stages):
            few, many = (g, h) if sizes[g] <= sizes[h] else (h, g)
            cost = np.empty((sizes[few], sizes[many]))
            for i in range(sizes[few]):
                for j in range(sizes[many]):
                    cost[i, j] = hop_s[members[few, i], members[many, j]]
            links[g, h] = bottleneck(cost, match)
            links[h, g] = links[g, h]
    return links


MOST_STAGES = 13
"""Tours of more stages than this are improved by exchanges instead of being solved exactly."""


@compiled
def tour(links: F64, sizes: I64, is_closed: bool, order: I64) -> float:
    """Length of the shortest tour through all groups from group 0; `order` (num_stages,) becomes it.

    Only groups of equal size take each other's places: the k-th of the tour has `sizes[k]` workers.

    Source: Held and Karp 1962; beyond `MOST_STAGES` the best that exchanges of two places lead to.
    """
    num_stages = len(order)
    order[0] = 0
    if num_stages > MOST_STAGES:
        for k in range(num_stages):
            order[k] = k
        return _exchange(links, sizes, is_closed, order)
    num_others = num_stages - 1
    # best[mask, last]: shortest from group 0 through the groups of `mask`, ending in group last + 1.
    best = np.full((1 << num_others, max(num_others, 1)), np.inf)
    came = np.zeros((1 << num_others, max(num_others, 1)), np.int64)
    if num_others == 0:
        return 0.0
    for last in range(num_others):
        if sizes[last + 1] == sizes[1]:
            best[1 << last, last] = links[0, last + 1]
    for mask in range(1, 1 << num_others):
        place = 1
        for other in range(num_others):
            place += (mask >> other) & 1
        for last in range(num_others):
            here = best[mask, last]
            if here == np.inf:
                continue
            for other in range(num_others):
                if (mask >> other) & 1 or sizes[other + 1] != sizes[place]:
                    continue
                further = mask | (1 << other)
                length = here + links[last + 1, other + 1]
                if length < best[further, other]:
                    best[further, other] = length
                    came[further, other] = last
    mask = (1 << num_others) - 1
    shortest, at = np.inf, 0
    for last in range(num_others):
        length = best[mask, last] + (links[last + 1, 0] if is_closed else 0.0)
        if length < shortest:
            shortest, at = length, last
    for place in range(num_others, 0, -1):
        order[place] = at + 1
        mask, at = mask & ~(1 << at), came[mask, at]
    return shortest


@compiled
def _length(links: F64, is_closed: bool, order: I64) -> float:
    total = links[order[-1], order[0]] if is_closed else 0.0
    for k in range(1, len(order)):
        total += links[order[k - 1], order[k]]
    return total


@compiled
def _exchange(links: F64, sizes: I64, is_closed: bool, order: I64) -> float:
    shortest = _length(links, is_closed, order)
    is_better = True
    while is_better:
        is_better = False
        for i in range(1, len(order)):
            for j in range(i + 1, len(order)):
                if sizes[i] != sizes[j]:
                    continue
                order[i], order[j] = order[j], order[i]
                length = _length(links, is_closed, order)
                if length < shortest - 1e-12:
                    shortest = length
                    is_better = True
                else:
                    order[i], order[j] = order[j], order[i]
    return shortest


@compiled
def score(
    group_of: I64,
    sizes: I64,
    hop_s: F64,
    share_s: F64,
    split_s: F64,
    adds_up: bool,
    is_closed: bool,
    order: I64,
) -> float:
    """Seconds of aggregation + 2 x seconds of the tour; `order` becomes the tour.

    Args:
        group_of: (N,) group of each worker.
        sizes: (G,) workers of each group; groups from `len(order)` on count for nothing.
        hop_s: (N, N) symmetric, what a matched pair of neighbouring groups costs.
        share_s: (N, N) what another member costs a member's aggregation, whatever the size of their group.
        split_s: (N, N) what it costs besides, divided by that size.
        adds_up: a member's aggregation is the sum over the others; otherwise the largest.
        is_closed: whether the tour returns to group 0.
    """
    aggregation_s = 0.0
    for worker in range(len(group_of)):
        group = group_of[worker]
        if group >= len(order):
            continue
        own_s = 0.0
        for other in range(len(group_of)):
            if other != worker and group_of[other] == group:
                cost = share_s[worker, other] + split_s[worker, other] / sizes[group]
                own_s = own_s + cost if adds_up else max(own_s, cost)
        aggregation_s = max(aggregation_s, own_s)
    links = link_groups(hop_s, group_of, sizes, len(order))
    return aggregation_s + 2.0 * tour(links, sizes, is_closed, order)


@compiled
def best_moves(
    group_of: I64, is_locked: I64, pull: F64, gain: F64, gain_to: F64, start: int, mover: I64, target: I64
) -> None:
    """The best move out of each group by workers that are not locked.

    Args:
        group_of: (N,) group of each worker.
        is_locked: (N,) 1 for workers that have moved already.
        pull: (N, G) how much each worker is drawn to each group.
        gain: out, (G,) of the best move; minus infinity if nobody may move.
        gain_to: out, (G,) of the best move to group `start`.
        start: where the cycle began.
        mover: out, (G,) who; -1 for nobody.
        target: out, (G,) to which group.
    """
    num_groups = len(gain)
    gain[:] = -np.inf
    gain_to[:] = -np.inf
    mover[:] = -1
    target[:] = -1
    for worker in range(len(group_of)):
        if is_locked[worker]:
            continue
        own = group_of[worker]
        for group in range(num_groups):
            if group == own:
                continue
            more = pull[worker, group] - pull[worker, own]
            if group == start:
                gain_to[own] = max(gain_to[own], more)
            if more > gain[own]:
                gain[own] = more
                mover[own] = worker
                target[own] = group


@compiled
def move(worker: int, to: int, group_of: I64, num_stages: int, pull_s: F64, pull: F64) -> None:
    """Puts `worker` into group `to` and says so to all others' `pull`."""
    own = group_of[worker]
    for other in range(len(group_of)):
        if other != worker and own < num_stages:
            pull[other, own] -= pull_s[other, worker]
        if other != worker and to < num_stages:
            pull[other, to] += pull_s[other, worker]
    group_of[worker] = to


@compiled
def circulate(group_of: I64, num_groups: int, num_stages: int, pull_s: F64) -> I64:
    """`group_of` after the best run of cycles, each of which leaves all sizes as they are.

    A cycle begins with the group that has the best move; whoever receives a worker sends one on, until the first group
    has one again. It is cut after the move from which closing it at once gains most; then the best number of cycles is
    kept.

    Args:
        group_of: (N,), left as it is.
        num_groups: with the idle ones.
        num_stages: groups that count; nothing draws a worker to the others.
        pull_s: (N, N) how much two workers gain by being in one group.
    """
    num_workers = len(group_of)
    is_locked = np.zeros(num_workers, np.int64)
    is_visited = np.zeros(num_groups, np.int64)
    gain, gain_to = np.empty(num_groups), np.empty(num_groups)
    mover, target = np.empty(num_groups, np.int64), np.empty(num_groups, np.int64)
    who, left = np.empty(num_workers, np.int64), np.empty(num_workers, np.int64)
    gained, closing = np.empty(num_workers), np.empty(num_workers)
    here, best = group_of.copy(), group_of.copy()
    total, best_total = 0.0, 0.0
    for _ in range(num_groups):
        pull = np.zeros((num_workers, num_groups))
        for worker in range(num_workers):
            for other in range(num_workers):
                if other != worker and here[other] < num_stages:
                    pull[worker, here[other]] += pull_s[worker, other]
        best_moves(here, is_locked, pull, gain, gain_to, -1, mover, target)
        start = int(np.argmax(gain))
        if mover[start] < 0:
            break
        at, num_moves = start, 0
        while num_moves < num_workers:
            best_moves(here, is_locked, pull, gain, gain_to, start, mover, target)
            worker, to = mover[at], target[at]
            if worker < 0:
                worker, to = who[num_moves - 1], start
            who[num_moves], left[num_moves] = worker, at
            gained[num_moves], closing[num_moves] = gain[at], gain_to[at]
            num_moves += 1
            move(worker, to, here, num_stages, pull_s, pull)
            is_locked[worker] = 1
            is_visited[to] = 1
            at = to
            if at == start:
                break
        most, cut, sum_gained = 0.0, 0, 0.0
        for i in range(1, num_moves):
            sum_gained += gained[i - 1]
            if sum_gained + closing[i] > most:
                most, cut = sum_gained + closing[i], i
        for i in range(num_moves - 1, cut, -1):
            here[who[i]] = left[i]
        here[who[cut]] = start
        total += most
        if total > best_total:
            best_total = total
            best = here.copy()
        if is_visited.sum() == num_groups:
            break
    return best


@compiled
def breed(
    pool: I64,
    scores: F64,
    parents: I64,
    points: I64,
    sizes: I64,
    num_stages: int,
    pull_s: F64,
    hop_s: F64,
    share_s: F64,
    split_s: F64,
    adds_up: bool,
    is_closed: bool,
) -> None:
    """One child after the other: it takes the place of its worse parent unless it is worse than both.

    Args:
        pool: (members, N) group of each worker; changed.
        scores: (members,); changed.
        parents: (children, 2).
        points: (children, points) workers whose group comes from the first parent; the others' from the second.
    """
    order = np.empty(num_stages, np.int64)
    for i in range(len(parents)):
        first, second = parents[i]
        child = pool[second].copy()
        for worker in points[i]:
            child[worker] = pool[first, worker]
        _repair(child, sizes)
        child = circulate(child, len(sizes), num_stages, pull_s)
        its_score = score(child, sizes, hop_s, share_s, split_s, adds_up, is_closed, order)
        if its_score <= max(scores[first], scores[second]):
            worse = first if scores[first] > scores[second] else second
            pool[worse] = child
            scores[worse] = its_score


@compiled
def _repair(group_of: I64, sizes: I64) -> None:
    """Moves workers of groups that are too large to the first group with room, in ascending order."""
    count = np.zeros(len(sizes), np.int64)
    for group in group_of:
        count[group] += 1
    for worker in range(len(group_of)):
        group = group_of[worker]
        if count[group] > sizes[group]:
            for to in range(len(sizes)):
                if count[to] < sizes[to]:
                    count[group] -= 1
                    count[to] += 1
                    group_of[worker] = to
                    break
