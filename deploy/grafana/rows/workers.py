"""Who is here, and what keeps each worker busy or idle."""

from grafana_foundation_sdk.models import units

from deploy.grafana.rows.panel import Panel, Row, query, rate

WORKERS = Row(
    title="Workers",
    columns=2,
    panels=(
        Panel(
            title="Workers by state",
            about="Idle and working ones are alive; draining ones leave; lost ones went silent.",
            queries=(query("skein_workers", "{{state}}"),),
            is_stacked=True,
        ),
        Panel(
            title="Lease left",
            about="A worker whose lease runs out counts as lost.",
            queries=(query("skein_lease_remaining_seconds", "{{worker}}"),),
            unit=units.Seconds,
        ),
        Panel(
            title="Time in ops, by kind",
            about="Seconds of compute per second, over all workers.",
            queries=(query(rate("skein_worker_op_seconds_sum", "kind"), "{{kind}}"),),
            is_stacked=True,
        ),
        Panel(
            title="Bubble",
            about="Share of the last step in which a worker ran no op, and of the step that was planned.",
            queries=(
                query("skein_planned_bubble_ratio", "{{worker}}, planned"),
                query("skein_worker_bubble_ratio", "{{worker}}"),
            ),
            unit=units.PercentUnit,
        ),
        Panel(
            title="Microbatches in flight",
            about="Most at once between their forward and their backward pass in the newest step, as planned and held.",
            queries=(
                query("skein_worker_slots", "{{worker}}, planned"),
                query("skein_worker_peak_in_flight_microbatches", "{{worker}}"),
            ),
        ),
        Panel(
            title="Weight gradients put aside",
            about="Microbatches that wait for their weight op, where backwards are split.",
            queries=(query("skein_worker_pending_microbatches", "{{worker}}"),),
        ),
        Panel(
            title="Activations",
            about="Most at once in a step between forward and backward, as planned and as held in the newest step; "
            "reckoned: microbatches by what one takes of memory.",
            queries=(
                query('skein_activation_bytes{kind="planned"}', "{{worker}}, planned"),
                query('skein_activation_bytes{kind="held"}', "{{worker}}"),
            ),
            unit=units.BytesIEC,
        ),
        Panel(
            title="Bytes put aside for weight gradients",
            about="What they are to be made of: most at once in the newest step, and now.",
            queries=(
                query("skein_worker_peak_pending_bytes", "{{worker}}, peak"),
                query("skein_worker_pending_bytes", "{{worker}}"),
            ),
            unit=units.BytesIEC,
        ),
        Panel(
            title="Ops that wait, by kind",
            about="They could run, and the worker is busy with another.",
            queries=(query("sum by (kind) (skein_worker_queued_ops)", "{{kind}}"),),
            is_stacked=True,
        ),
        Panel(
            title="Jobs in the queue",
            about="Jobs that wait until workers are free for all their stages.",
            queries=(query("skein_queue_jobs", "jobs"),),
        ),
        Panel(
            title="Time in the queue",
            about="Since when each of them has been waiting.",
            queries=(query("skein_queue_waiting_seconds or vector(0)", "{{job}}"),),
            unit=units.Seconds,
        ),
        Panel(
            title="Stored, by namespace",
            about="Checkpoints of its jobs, wherever they lie.",
            queries=(query("skein_stored_bytes", "{{namespace}}"),),
            unit=units.BytesIEC,
        ),
        Panel(
            title="Use of quotas",
            about="Share of what the operator lets a namespace take; nothing where nothing is bounded.",
            queries=(query("skein_quota_used_ratio or vector(0)", "{{namespace}} {{quota}}"),),
            unit=units.PercentUnit,
        ),
    ),
)
