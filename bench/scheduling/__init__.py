"""Orders of ops, each alone: legal or not, how long on which fleet, and which suits it best.

- `legality`: what is wrong with a schedule, a sentence each; what its activations need.
- `pricing`: seconds and bytes of stages and links.
- `simulate`: when every op starts and ends, exactly.
- `depth`: closed forms for how many microbatches are under way.
- `choice`: simulate all that fit, least makespan first, and say why the others do not.
"""
