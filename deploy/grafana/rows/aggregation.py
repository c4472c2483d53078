"""What replicas exchange, and what it does to them."""

from grafana_foundation_sdk.models import units

from deploy.grafana.rows.panel import Panel, Row, query, rate

AGGREGATION = Row(
    title="Aggregation",
    columns=2,
    panels=(
        Panel(
            title="Aggregation bytes per second, by rule",
            about="Gradients, parameters and changes that workers send each other, as they travel.",
            queries=(query(rate("skein_aggregation_bytes_total", "rule"), "{{rule}}"),),
            unit=units.BytesPerSecondIEC,
            is_stacked=True,
        ),
        Panel(
            title="Aggregation bytes per second, by link",
            about="The same, from worker to worker.",
            queries=(query(rate("skein_aggregation_bytes_total", "src, dst"), "{{src}} → {{dst}}"),),
            unit=units.BytesPerSecondIEC,
        ),
        Panel(
            title="Aggregation bytes per step",
            about="Of all workers together, over all jobs: what the rule is chosen for.",
            queries=(
                query(
                    "sum(rate(skein_aggregation_bytes_total[$__rate_interval]))"
                    " / sum(rate(skein_committed_steps_total[$__rate_interval]))"
                ),
            ),
            unit=units.BytesIEC,
        ),
        Panel(
            title="Compression",
            about="How many times fewer bytes the newest exchange took than in float32.",
            queries=(query("skein_compression_ratio", "{{worker}}"),),
        ),
        Panel(
            title="Consensus distance",
            about="How far walkers are from the mean that they are drawn to, or from their leader, by stage: "
            "it should level off, not grow.",
            queries=(
                query("max by (stage) (skein_consensus_distance)", "stage {{stage}} farthest"),
                query("avg by (stage) (skein_consensus_distance)", "stage {{stage}} mean"),
            ),
        ),
        Panel(
            title="Error feedback",
            about="Norm of what was rounded away and is still to be sent, by stage: it should level off, not grow.",
            queries=(query("max by (stage) (skein_error_feedback_norm)", "stage {{stage}}"),),
        ),
        Panel(
            title="Probe scores",
            about="Loss of each walker on the probe batch, per token; the least leads.",
            queries=(query("skein_probe_score_nats", "{{walker}}"),),
        ),
        Panel(
            title="Leader changes",
            about="How often a worker's leader became another, over an hour.",
            queries=(
                query(
                    "max by (worker) (increase(skein_leader_changes_total[1h])) or vector(0)", "{{worker}}"
                ),
            ),
        ),
    ),
)
