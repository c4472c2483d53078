"""Simulation of one step of a routing, event by event, in exact order: when every op starts, when the step is over.

Rules of this file
- A worker runs one op at a time, to its end: among what is ready backward and loss come before forward, then the
  earlier arrival. A forward takes a slot of its chunk, which the microbatch's backward there gives back.
- A transfer begins when both the sender's uplink and the receiver's downlink are free of earlier ones; links whose
  `wire_s` is 0 carry any number at once.
- Events of one moment are all taken before any worker starts anew; workers then start in ascending order.
- A microbatch's ops are taken in the order of their numbers; `op_array` has what each does.
"""

import numpy as np
import numpy.typing as npt

from skein.plan.route.kernels.arrays import SLOTS, SUMS
from skein.plan.route.kernels.compiled import compiled

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

NEVER = np.inf


@compiled
def simulate(
    way: I64,
    worker_of: I64,
    ops: I64,
    op_s: F64,
    transfer_s: F64,
    wire_s: F64,
    slots: I64,
    limit_s: float,
    begin_s: F64,
    end_s: F64,
) -> float:
    """Seconds until the last microbatch is back; infinite if that is after `limit_s` or never (slots deadlock).

    Args:
        way: (num_microbatches, ops of each) chunk of each op.
        worker_of: (num_chunks,) worker of each chunk.
        ops: of each microbatch, see `op_array`.
        op_s: (ops of each, num_chunks) seconds of an op there.
        transfer_s: (num_workers, num_workers) seconds from a to b, latency included; `wire_s` of it both ends are busy.
        slots: (num_chunks,) microbatches that a chunk may hold.
        limit_s: when to give up.
        begin_s: out, (num_microbatches, ops of each) when each op starts; not written if it has no rows.
        end_s: out, (num_microbatches,) when each microbatch is back; NEVER if it is not.
    """
    num_microbatches = len(way)
    num_workers = transfer_s.shape[0]
    last_op = len(ops) - 1
    keeps = begin_s.shape[0] > 0
    free = slots.copy()
    is_busy = np.zeros(num_workers, np.bool_)
    up_s = np.zeros(num_workers)
    down_s = np.zeros(num_workers)
    # Each microbatch is in one place: on its way (heap), ready (list of its worker) or running (heap).
    op_of = np.zeros(num_microbatches, np.int64)
    is_running = np.zeros(num_microbatches, np.bool_)
    ready_s = np.zeros(num_microbatches)
    ready_number = np.zeros(num_microbatches, np.int64)
    first_ready = np.full(num_workers, -1)
    next_ready = np.full(num_microbatches, -1)
    # The heap is three flat arrays, so that an event makes no object; its numbers tell equal times apart.
    heap_s = np.empty(num_microbatches + 1)
    heap_number = np.empty(num_microbatches + 1, np.int64)
    heap_item = np.empty(num_microbatches + 1, np.int64)
    # In one moment a microbatch may end an op, and arrive where its way takes no time.
    touched = np.empty(2 * num_microbatches, np.int64)
    heap_len = 0
    number = 0
    for m in range(num_microbatches):
        end_s[m] = NEVER
        number += 1
        heap_s[heap_len] = 0.0
        heap_number[heap_len] = number
        heap_item[heap_len] = m
        heap_len += 1
    last_s = 0.0
    num_left = num_microbatches
    while heap_len > 0:
        now = heap_s[0]
        if now > limit_s:
            return NEVER
        num_touched = 0
        while heap_len > 0 and heap_s[0] == now:
            m = heap_item[0]
            its_number = heap_number[0]
            # Pop.
            heap_len -= 1
            time, key, item = heap_s[heap_len], heap_number[heap_len], heap_item[heap_len]
            at = 0
            while True:
                child = 2 * at + 1
                if child >= heap_len:
                    break
                right = child + 1
                if right < heap_len and (
                    heap_s[right] < heap_s[child]
                    or (heap_s[right] == heap_s[child] and heap_number[right] < heap_number[child])
                ):
                    child = right
                if heap_s[child] < time or (heap_s[child] == time and heap_number[child] < key):
                    heap_s[at], heap_number[at], heap_item[at] = (
                        heap_s[child],
                        heap_number[child],
                        heap_item[child],
                    )
                    at = child
                else:
                    break
            heap_s[at], heap_number[at], heap_item[at] = time, key, item
            op = op_of[m]
            worker = worker_of[way[m, op]]
            touched[num_touched] = worker
            num_touched += 1
            # An arrival only queues: what else comes in this moment may be more urgent.
            if not is_running[m]:
                ready_s[m] = now
                ready_number[m] = its_number
                next_ready[m] = first_ready[worker]
                first_ready[worker] = m
                continue
            is_running[m] = False
            is_busy[worker] = False
            if ops[op, SLOTS] < 0:
                free[way[m, op]] -= ops[op, SLOTS]
            if op == last_op:
                end_s[m] = now
                last_s = now
                num_left -= 1
                continue
            op += 1
            op_of[m] = op
            target = worker_of[way[m, op]]
            busy_s = wire_s[worker, target]
            begins_s = now
            # Both ends are taken for the wire's time alone; while latency passes they serve others.
            if busy_s > 0.0:
                begins_s = max(now, up_s[worker], down_s[target])
                up_s[worker] = begins_s + busy_s
                down_s[target] = begins_s + busy_s
            number += 1
            # Push.
            time = begins_s + transfer_s[worker, target]
            at = heap_len
            heap_len += 1
            while at > 0:
                parent = (at - 1) >> 1
                if heap_s[parent] < time or (heap_s[parent] == time and heap_number[parent] < number):
                    break
                heap_s[at], heap_number[at], heap_item[at] = (
                    heap_s[parent],
                    heap_number[parent],
                    heap_item[parent],
                )
                at = parent
            heap_s[at], heap_number[at], heap_item[at] = time, number, m
        # Ascending, so that starts do not hang on the order in which this moment's events were taken.
        if num_touched > 1:
            for i in range(1, num_touched):
                worker = touched[i]
                j = i - 1
                while j >= 0 and touched[j] > worker:
                    touched[j + 1] = touched[j]
                    j -= 1
                touched[j + 1] = worker
        for i in range(num_touched):
            worker = touched[i]
            if is_busy[worker]:
                continue
            best = -1
            best_forward = True
            before_best = -1
            before = -1
            m = first_ready[worker]
            while m >= 0:
                op = op_of[m]
                is_forward = not ops[op, SUMS]
                # A forward without a slot is passed over: a backward behind it may give one back.
                if not (ops[op, SLOTS] > 0 and free[way[m, op]] <= 0):
                    if best < 0:
                        better = True
                    elif is_forward != best_forward:
                        better = best_forward
                    elif ready_s[m] != ready_s[best]:
                        better = ready_s[m] < ready_s[best]
                    else:
                        better = ready_number[m] < ready_number[best]
                    if better:
                        best, best_forward, before_best = m, is_forward, before
                before = m
                m = next_ready[m]
            if best < 0:
                continue
            if before_best < 0:
                first_ready[worker] = next_ready[best]
            else:
                next_ready[before_best] = next_ready[best]
            op = op_of[best]
            chunk = way[best, op]
            if ops[op, SLOTS] > 0:
                free[chunk] -= ops[op, SLOTS]
            takes_s = op_s[op, chunk]
            if keeps:
                begin_s[best, op] = now
            is_busy[worker] = True
            is_running[best] = True
            number += 1
            time = now + takes_s
            at = heap_len
            heap_len += 1
            while at > 0:
                parent = (at - 1) >> 1
                if heap_s[parent] < time or (heap_s[parent] == time and heap_number[parent] < number):
                    break
                heap_s[at], heap_number[at], heap_item[at] = (
                    heap_s[parent],
                    heap_number[parent],
                    heap_item[parent],
                )
                at = parent
            heap_s[at], heap_number[at], heap_item[at] = time, number, best
    # No event is left: microbatches that are not back wait for each other's slots.
    return last_s if num_left == 0 else NEVER
