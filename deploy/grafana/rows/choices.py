"""Rows that jobs choose along the run: whether that is worth its time, and what the choice is like."""

from grafana_foundation_sdk.models import units

from deploy.grafana.rows.panel import Panel, Row, query, rate

CHOICES = Row(
    title="Choices of rows",
    columns=3,
    panels=(
        Panel(
            title="Selection, share of time",
            about="Seconds of the newest choice over those of the training before it.",
            queries=(query("skein_choice_overhead_ratio", "{{job}}"),),
            unit=units.PercentUnit,
        ),
        Panel(
            title="Selection seconds",
            about="Seconds of selections in each second: training stands still in them.",
            queries=(query(rate("skein_choice_seconds_total", "job"), "{{job}}"),),
            unit=units.PercentUnit,
        ),
        Panel(
            title="Distance of rows to the choice",
            about="From all rows to what stands for them, summed, at most; by the model as it was then.",
            queries=(query("skein_choice_farness", "{{job}}"),),
        ),
        Panel(
            title="Largest weight",
            about="Weight of the row that counts most, the mean being 1. Where it grows a few rows decide the step.",
            queries=(query("skein_choice_weight_max", "{{job}}"),),
        ),
        Panel(
            title="Rows ever seen",
            about="Share of all rows that was ever drawn, or may be now.",
            queries=(query("skein_choice_seen_ratio", "{{job}}"),),
            unit=units.PercentUnit,
        ),
        Panel(
            title="Fallbacks",
            about="Workers whose candidates were wanting, over an hour, and rows whose features were not finite.",
            queries=(
                query(
                    "sum by (job) (increase(skein_choice_faults_total[1h])) or vector(0)",
                    "{{job}} drawn by chance",
                ),
                query("skein_choice_set_aside_rows", "{{job}} set aside"),
            ),
        ),
    ),
)
