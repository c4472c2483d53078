"""What devices of a mesh wait for, planned beside measured."""

from grafana_foundation_sdk.models import units

from deploy.grafana.rows.panel import Panel, Row, each, query, rate

MESHES = Row(
    title="Meshes",
    columns=2,
    panels=(
        Panel(
            title="One collective",
            about="What a mesh's devices wait for one, measured and planned; tp: a sum or gather of blocks in parts, "
            "a2a: the rows of a layer of experts.",
            queries=(
                query(
                    each(
                        "skein_worker_collective_seconds_total",
                        "skein_worker_collectives_total",
                        "worker, kind",
                    ),
                    "{{worker}} {{kind}}",
                ),
                query(
                    each(
                        "skein_worker_collective_predicted_seconds_total",
                        "skein_worker_collectives_total",
                        "worker, kind",
                    ),
                    "{{worker}} {{kind}}, planned",
                ),
            ),
            unit=units.Seconds,
        ),
        Panel(
            title="Time in collectives",
            about="Seconds per second for which a mesh's devices wait for each other, computing nothing beside.",
            queries=(
                query(
                    rate("skein_worker_collective_seconds_total", "worker, kind") + " > 0",
                    "{{worker}} {{kind}}",
                ),
            ),
            is_stacked=True,
        ),
    ),
)
