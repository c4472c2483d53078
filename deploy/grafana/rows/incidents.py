"""What failed, what was done about it, and what could be gone back to."""

from grafana_foundation_sdk.models import units

from deploy.grafana.rows.panel import Panel, Row, quantile_so_far, query

RECOVERY = Row(
    title="Checkpoints and recovery",
    columns=2,
    panels=(
        Panel(
            title="Checkpoint age",
            about="Since the newest checkpoint of each job; stands still when the job has ended.",
            queries=(query("skein_checkpoint_age_seconds", "{{job}}"),),
            unit=units.Seconds,
        ),
        Panel(
            title="Checkpoint writing",
            about="Mean time that a stage took, in the background.",
            queries=(
                query(
                    "sum by (worker) (skein_worker_checkpoint_seconds_sum)"
                    " / sum by (worker) (skein_worker_checkpoint_seconds_count)",
                    "{{worker}}",
                ),
            ),
            unit=units.Seconds,
        ),
        Panel(
            title="Checkpoints, plans and rollbacks",
            about="Counted since each job was submitted.",
            queries=(
                query("skein_checkpoints_total", "{{job}} checkpoints"),
                query("skein_generations_total", "{{job}} plans"),
                query("skein_rollbacks_total", "{{job}} rollbacks"),
            ),
        ),
        Panel(
            title="Checkpoint bytes",
            about="Written by each worker since it started.",
            queries=(query("skein_worker_checkpoint_bytes_total", "{{worker}}"),),
            unit=units.BytesIEC,
        ),
    ),
)

INCIDENTS = Row(
    title="Incidents",
    columns=3,
    panels=(
        Panel(
            title="Incidents, by kind",
            about="Failures that are over, all jobs together: what failed.",
            queries=(query("sum by (kind) (skein_incidents_total)", "{{kind}}"),),
            is_stacked=True,
        ),
        Panel(
            title="Incidents, by remedy",
            about="What became of the step in progress; only a rollback costs committed steps.",
            queries=(query("sum by (remedy) (skein_incidents_total)", "{{remedy}}"),),
            is_stacked=True,
        ),
        Panel(
            title="Until work went on",
            about="From the notice of a failure, over all that the run log has; 0 where there was none.",
            queries=tuple(
                query(f"{quantile_so_far(share, 'skein_incident_seconds')} >= 0 or vector(0)", legend)
                for share, legend in ((0.5, "50 %"), (0.99, "99 %"))
            ),
            unit=units.Seconds,
        ),
        Panel(
            title="Quarantined workers",
            about="Workers that others have shown to contribute wrongly, all jobs together.",
            queries=(query("sum(skein_quarantined_workers_total) or vector(0)", "workers"),),
        ),
        Panel(
            title="Time in recovery",
            about="All incidents added up, by kind.",
            queries=(query("sum by (kind) (skein_incident_seconds_sum)", "{{kind}}"),),
            unit=units.Seconds,
            is_stacked=True,
        ),
        Panel(
            title="Lost and repeated",
            about="Committed steps that were lost, and samples that were computed again.",
            queries=(
                query("skein_incident_steps_lost_total", "steps lost"),
                query("skein_samples_repeated_total", "samples repeated"),
            ),
        ),
        Panel(
            title="Rerouted and replayed",
            about="Hops that got another worker, and contributions of one stage that were computed again.",
            queries=(
                query("skein_hops_rerouted_total", "hops rerouted"),
                query("skein_contributions_replayed_total", "contributions replayed"),
            ),
        ),
    ),
)
