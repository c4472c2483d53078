"""What travels between workers, and what was refused."""

from grafana_foundation_sdk.models import units

from deploy.grafana.rows.panel import Panel, Row, query, rate

WIRE = Row(
    title="Wire",
    columns=2,
    panels=(
        Panel(
            title="Bytes per second, by link",
            about="Tensors from worker to worker, as sent.",
            queries=(query(rate("skein_link_bytes_total", "src, dst"), "{{src}} → {{dst}}"),),
            unit=units.BytesPerSecondIEC,
        ),
        Panel(
            title="Bytes per second, by kind",
            about="Boundary tensors (edge), those to shards of the output and gradients from them, rows of the input, "
            "and sums of gradients, over all workers.",
            queries=(query(rate("skein_worker_tensor_bytes_total", "kind"), "{{kind}}"),),
            unit=units.BytesPerSecondIEC,
            is_stacked=True,
        ),
        Panel(
            title="Links by way of relays",
            about="Directed pairs of workers that cannot dial each other, by who carries for them.",
            queries=(query("skein_relayed_links or vector(0)", "{{relay}}"),),
        ),
        Panel(
            title="Bytes per second through relays",
            about="The coordinator's host, and workers that relay or are called back.",
            queries=(
                query("rate(skein_relay_bytes_total[$__rate_interval])", "coordinator"),
                query(rate("skein_worker_relay_bytes_total", "worker"), "{{worker}}"),
            ),
            unit=units.BytesPerSecondIEC,
        ),
        Panel(
            title="Tensors held",
            about="Boundary tensors and shards that workers keep until their step commits.",
            queries=(query("skein_worker_payload_bytes", "{{worker}}"),),
            unit=units.BytesIEC,
        ),
        Panel(
            title="Calls refused by the coordinator",
            about="By method and reason.",
            queries=(
                query(
                    f"{rate('skein_rpc_errors_total', 'method, reason')} or vector(0)",
                    "{{method}} {{reason}}",
                ),
            ),
            unit=units.RequestsPerSecond,
        ),
        Panel(
            title="Calls that failed and tensors that were refused, at workers",
            about="By reason. An older generation's tensors are refused after each change of plan; that is no fault.",
            queries=(
                query(f"{rate('skein_worker_rpc_errors_total', 'reason')} or vector(0)", "failed {{reason}}"),
                query(f"{rate('skein_worker_refusals_total', 'reason')} or vector(0)", "refused {{reason}}"),
            ),
            unit=units.RequestsPerSecond,
        ),
    ),
)
