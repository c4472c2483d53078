"""Whether the service that decides is well."""

from grafana_foundation_sdk.models import units

from deploy.grafana.rows.panel import Panel, Row, mean, quantile, query

COORDINATOR = Row(
    title="Coordinator",
    columns=3,
    panels=(
        Panel(
            title="Event loop",
            about="How late a timer fires. Above 0.1 s leases are in danger.",
            queries=(query("skein_event_loop_lag_seconds", "lag"),),
            unit=units.Seconds,
        ),
        Panel(
            title="Run log append",
            about="Until a turn's records were on disk; nothing is sent before.",
            queries=(
                query(mean("skein_run_log_append_seconds", "instance"), "mean"),
                query(quantile(0.99, "skein_run_log_append_seconds", "le"), "99 %"),
            ),
            unit=units.Seconds,
        ),
        Panel(
            title="Plans",
            about="Answers of the planner, and their mean time.",
            queries=(
                query("sum by (result) (skein_plans_total)", "{{result}}"),
                query("skein_plan_seconds_sum / skein_plan_seconds_count", "mean seconds"),
            ),
        ),
        Panel(
            title="Epoch and generation",
            about="Openings of the run log, and the newest plan's number.",
            queries=(query("skein_epoch_number", "epoch"), query("skein_generation_number", "generation")),
        ),
        Panel(
            title="Control streams",
            about="One for each worker that is connected; workers that cannot be told of a standby.",
            queries=(
                query("skein_control_streams", "open"),
                query("skein_workers_unaware_of_standby", "unaware of a standby"),
            ),
        ),
        Panel(
            title="Room for the run log",
            about="Share of the state directory's disk that is free; without room nothing more is committed.",
            unit=units.PercentUnit,
            queries=(query("skein_state_free_bytes / skein_state_size_bytes", "free"),),
        ),
        Panel(
            title="Scrapes that succeed",
            about="1 while Prometheus reaches the coordinator, or hears of the worker by way of it.",
            queries=(query('up{service=~"coordinator|worker"}', "{{service}} {{instance}}"),),
        ),
    ),
)
