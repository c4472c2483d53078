"""What a job learns, how fast, and whether the plan holds."""

from grafana_foundation_sdk.models import units

from deploy.grafana.rows.panel import Panel, Row, mean, quantile, query, rate

AT_A_GLANCE = Row(
    title="At a glance",
    columns=6,
    panels=(
        Panel(
            title="Jobs running",
            about="Jobs that commit steps now.",
            queries=(query('skein_jobs{state="running"}'),),
            is_figure=True,
        ),
        Panel(
            title="Workers alive",
            about="Workers with and without work; neither draining nor lost.",
            queries=(query('sum(skein_workers{state=~"idle|working"})'),),
            is_figure=True,
        ),
        Panel(
            title="Steps",
            about="Committed steps that count, of each job.",
            queries=(query("skein_version_steps", "{{job}}"),),
            is_figure=True,
        ),
        Panel(
            title="Loss",
            about="Training loss of the newest step, nats per token.",
            queries=(query("skein_loss_nats", "{{job}}"),),
            is_figure=True,
        ),
        Panel(
            title="Tokens/s",
            about="Tokens trained on per second, smoothed, all jobs together.",
            queries=(query("sum(skein_throughput_tokens_per_second)"),),
            is_figure=True,
        ),
        Panel(
            title="Checkpoint age",
            about="How much work would be done again if everything went dark now.",
            queries=(query("skein_checkpoint_age_seconds", "{{job}}"),),
            unit=units.Seconds,
            is_figure=True,
        ),
    ),
)

TRAINING = Row(
    title="Training",
    columns=2,
    panels=(
        Panel(
            title="Loss",
            about="Nats per token, in training and on validation data.",
            queries=(
                query("skein_loss_nats", "{{job}}"),
                query("skein_evaluation_loss_nats", "{{job}} validation"),
            ),
        ),
        Panel(
            title="Tokens per second",
            about="As the coordinator smooths it, and as counted between two scrapes.",
            queries=(
                query("skein_throughput_tokens_per_second", "{{job}} smoothed"),
                query(rate("skein_trained_tokens_total", "job"), "{{job}}"),
            ),
        ),
        Panel(
            title="Step seconds",
            about="From one commit to the next, beside what the plan expects and what no plan could beat.",
            queries=(
                query(mean("skein_step_seconds", "job"), "{{job}} mean"),
                query(quantile(0.95, "skein_step_seconds", "job, le"), "{{job}} 95 %"),
                query("skein_predicted_step_seconds", "{{job}} predicted"),
                query("skein_lower_bound_step_seconds", "{{job}} lower bound"),
            ),
            unit=units.Seconds,
        ),
        Panel(
            title="Gradient norm",
            about="Global norm before clipping.",
            queries=(query("skein_gradient_norm", "{{job}}"),),
        ),
        Panel(
            title="Balance of experts",
            about="Mean balance loss of sparse layers: 1 where all experts are used evenly, more where few take most.",
            queries=(query("skein_balance_loss", "{{job}}"),),
        ),
        Panel(
            title="Tokens by expert",
            about="Choices of experts in the newest step, by layer; of many the busiest, the idlest and the mean.",
            queries=(
                query("sum by (layer, expert) (skein_expert_tokens)", "layer {{layer}} expert {{expert}}"),
            ),
        ),
        Panel(
            title="Choices dropped",
            about="Share of the choices of experts that found theirs full, where a job gives them a capacity.",
            queries=(query("skein_dropped_choices_ratio", "{{job}}"),),
        ),
        Panel(
            title="Learning rate",
            about="What the newest step was applied with.",
            queries=(query("skein_learning_rate", "{{job}}"),),
        ),
        Panel(
            title="Steps skipped and rolled back",
            about="Steps whose gradient was not finite, and steps given up by going back to a checkpoint.",
            queries=(
                query("sum by (job) (skein_skipped_steps_total) or vector(0)", "{{job}} skipped"),
                query("sum by (job) (skein_rolled_back_steps_total) or vector(0)", "{{job}} rolled back"),
            ),
        ),
    ),
)

PLAN = Row(
    title="Plan and reality",
    columns=2,
    panels=(
        Panel(
            title="Step",
            about="As planned, and the median of the last ones; too far apart, and another plan is asked for.",
            queries=(query("skein_plan_step_seconds", "{{job}} {{kind}}"),),
            unit=units.Seconds,
        ),
        Panel(
            title="Holders that stages lack",
            about="Of those that jobs ask for. Above 0 a death may cost committed steps.",
            queries=(
                query(
                    'skein_stage_holders{kind="asked"} - ignoring(kind) skein_stage_holders{kind="held"}',
                    "{{job}} stage {{stage}}",
                ),
            ),
        ),
        Panel(
            title="Ops, by stage",
            about="One microbatch at one of the stage's holders, planned and measured.",
            queries=(query("skein_stage_op_seconds", "{{job}} stage {{stage}} {{op}} {{kind}}"),),
            unit=units.Seconds,
        ),
    ),
)
