"""Arrays of trials: how many rows train side by side, whether that is worth it, and which had to go."""

from grafana_foundation_sdk.models import units

from deploy.grafana.rows.panel import Panel, Row, query

ARRAYS = Row(
    title="Trials side by side",
    columns=3,
    panels=(
        Panel(
            title="Trials",
            about="Trials of sweeps that go on, by what became of them.",
            queries=(query("sum by (state) (skein_sweep_trials) or vector(0)", "{{state}}"),),
        ),
        Panel(
            title="Rows of arrays",
            about="Trials that train in one process, and those of them that are not retired.",
            queries=(
                query("skein_array_rows", "{{job}}"),
                query("skein_array_alive_rows", "{{job}} not retired"),
            ),
        ),
        Panel(
            title="One pass over all rows",
            about="Times as fast as row after row, as measured at the worker. Below the job's bound rows go in turn.",
            queries=(
                query("skein_array_speedup_ratio", "{{job}}"),
                query("skein_array_together", "{{job}} is taken"),
            ),
        ),
        Panel(
            title="Steps of a round",
            about="Steps of each row between two commits: what a worker's death costs.",
            queries=(query("skein_array_round_steps", "{{job}}"),),
        ),
        Panel(
            title="Retired rows",
            about="Over an hour, by what was not finite.",
            queries=(
                query(
                    "sum by (reason) (increase(skein_array_retired_rows_total[1h])) or vector(0)",
                    "{{reason}}",
                ),
            ),
            unit=units.Short,
        ),
    ),
)
