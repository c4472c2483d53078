"""Op schedules: in which order each worker runs the forwards and backwards of a step, and which order suits a fleet.

- `ops`: one representation, `Schedule`: for each worker of one pipeline an ordered list of `Op`s.
- `whole`, `split`, `vshape`: a generator each for GPipe, 1F1B, interleaved, breadth-first, zero-bubble and V orders.
- `table`: all of them by name, with the shapes that each can do.
- `check`: what is wrong with a schedule, a sentence each; what its activations need.
- `cost`: seconds and bytes of stages and links.
- `simulate`: when every op starts and ends, exactly.
- `choose`: simulate all that fit, least makespan first, and say why the others do not.

Workers are positions in the pipeline here, not names: a schedule is chosen before anybody is placed.
"""
