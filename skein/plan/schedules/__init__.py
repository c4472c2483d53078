"""Op schedules: in which order each worker runs the forwards and backwards of a step.

The search's first orders come from here; `tests.support.scheduling` compares them by itself.

- `ops`: one representation, `Schedule`: for each worker of one pipeline an ordered list of `Op`s.
- `whole`, `split`, `vshape`: a generator each for GPipe, 1F1B, interleaved, breadth-first, zero-bubble and V orders.
- `table`: all of them by name, with the shapes that each can do.

Workers are positions in the pipeline here, not names: a schedule is chosen before anybody is placed.
"""
