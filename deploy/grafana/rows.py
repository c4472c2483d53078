"""What the dashboard shows: `ROWS`, panel by panel. Drawn by `dashboard.py`.

Rules of this file
- One table, `ROWS`, says everything; each expression stands in it as Prometheus will see it.
- Expressions use metrics of the coordinator's page and Grafana's `$__rate_interval`, and no other variable: whoever
  replaces that one can ask Prometheus every question of the dashboard. `make compose-test` does.
- What nobody counted yet has no series; where that is good news, the expression ends in `or vector(0)`.
"""

from dataclasses import dataclass

from grafana_foundation_sdk.models import units


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A PromQL expression, and how its series are called, in Grafana's `{{label}}` form."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart, or one figure with its recent course."""

    title: str
    about: str
    queries: tuple[Query, ...]
    unit: str = units.Short
    is_figure: bool = False
    is_stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels under one heading, as many to a line as `columns` says."""

    title: str
    columns: int
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A dashboard: rows for those who have one question. `name` is that of its file."""

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]


def _query(expr: str, legend: str = "") -> Query:
    return Query(expr=expr, legend=legend)


def _rate(counter: str, by: str) -> str:
    return f"sum by ({by}) (rate({counter}[$__rate_interval]))"


def _mean(histogram: str, by: str) -> str:
    return f"{_rate(f'{histogram}_sum', by)} / {_rate(f'{histogram}_count', by)}"


def _quantile(share: float, histogram: str, by: str) -> str:
    return f"histogram_quantile({share}, {_rate(f'{histogram}_bucket', by)})"


def _quantile_so_far(share: float, histogram: str) -> str:
    """Over everything counted, for what is too rare to have a rate; not a number before anything was."""
    return f"histogram_quantile({share}, sum by (le) ({histogram}_bucket))"


_AT_A_GLANCE = Row(
    title="At a glance",
    columns=6,
    panels=(
        Panel(
            title="Jobs running",
            about="Jobs that commit steps now.",
            queries=(_query('skein_jobs{state="running"}'),),
            is_figure=True,
        ),
        Panel(
            title="Workers alive",
            about="Workers with and without work; neither draining nor lost.",
            queries=(_query('sum(skein_workers{state=~"idle|working"})'),),
            is_figure=True,
        ),
        Panel(
            title="Steps",
            about="Committed steps that count, of each job.",
            queries=(_query("skein_version_steps", "{{job}}"),),
            is_figure=True,
        ),
        Panel(
            title="Loss",
            about="Training loss of the newest step, nats per token.",
            queries=(_query("skein_loss_nats", "{{job}}"),),
            is_figure=True,
        ),
        Panel(
            title="Tokens/s",
            about="Tokens trained on per second, smoothed, all jobs together.",
            queries=(_query("sum(skein_throughput_tokens_per_second)"),),
            is_figure=True,
        ),
        Panel(
            title="Checkpoint age",
            about="How much work would be done again if everything went dark now.",
            queries=(_query("skein_checkpoint_age_seconds", "{{job}}"),),
            unit=units.Seconds,
            is_figure=True,
        ),
    ),
)

_TRAINING = Row(
    title="Training",
    columns=2,
    panels=(
        Panel(
            title="Loss",
            about="Nats per token, in training and on validation data.",
            queries=(
                _query("skein_loss_nats", "{{job}}"),
                _query("skein_evaluation_loss_nats", "{{job}} validation"),
            ),
        ),
        Panel(
            title="Tokens per second",
            about="As the coordinator smooths it, and as counted between two scrapes.",
            queries=(
                _query("skein_throughput_tokens_per_second", "{{job}} smoothed"),
                _query(_rate("skein_trained_tokens_total", "job"), "{{job}}"),
            ),
        ),
        Panel(
            title="Step seconds",
            about="From one commit to the next, beside what the plan expects and what no plan could beat.",
            queries=(
                _query(_mean("skein_step_seconds", "job"), "{{job}} mean"),
                _query(_quantile(0.95, "skein_step_seconds", "job, le"), "{{job}} 95 %"),
                _query("skein_predicted_step_seconds", "{{job}} predicted"),
                _query("skein_lower_bound_step_seconds", "{{job}} lower bound"),
            ),
            unit=units.Seconds,
        ),
        Panel(
            title="Gradient norm",
            about="Global norm before clipping.",
            queries=(_query("skein_gradient_norm", "{{job}}"),),
        ),
        Panel(
            title="Balance of experts",
            about="Mean balance loss of sparse layers: 1 where all experts are used evenly, more where few take most.",
            queries=(_query("skein_balance_loss", "{{job}}"),),
        ),
        Panel(
            title="Choices dropped",
            about="Share of the choices of experts that found theirs full, where a job gives them a capacity.",
            queries=(_query("skein_dropped_choices_ratio", "{{job}}"),),
        ),
        Panel(
            title="Learning rate",
            about="What the newest step was applied with.",
            queries=(_query("skein_learning_rate", "{{job}}"),),
        ),
        Panel(
            title="Steps skipped and rolled back",
            about="Steps whose gradient was not finite, and steps given up by going back to a checkpoint.",
            queries=(
                _query("sum by (job) (skein_skipped_steps_total) or vector(0)", "{{job}} skipped"),
                _query("sum by (job) (skein_rolled_back_steps_total) or vector(0)", "{{job}} rolled back"),
            ),
        ),
    ),
)

_PLAN = Row(
    title="Plan and reality",
    columns=2,
    panels=(
        Panel(
            title="Step",
            about="As planned, and the median of the last ones; too far apart, and another plan is asked for.",
            queries=(_query("skein_plan_step_seconds", "{{job}} {{kind}}"),),
            unit=units.Seconds,
        ),
        Panel(
            title="Holders that stages lack",
            about="Of those that jobs ask for. Above 0 a death may cost committed steps.",
            queries=(
                _query(
                    'skein_stage_holders{kind="asked"} - ignoring(kind) skein_stage_holders{kind="held"}',
                    "{{job}} stage {{stage}}",
                ),
            ),
        ),
        Panel(
            title="Ops, by stage",
            about="One microbatch at one of the stage's holders, planned and measured.",
            queries=(_query("skein_stage_op_seconds", "{{job}} stage {{stage}} {{op}} {{kind}}"),),
            unit=units.Seconds,
        ),
    ),
)

_WORKERS = Row(
    title="Workers",
    columns=2,
    panels=(
        Panel(
            title="Workers by state",
            about="Idle and working ones are alive; draining ones leave; lost ones went silent.",
            queries=(_query("skein_workers", "{{state}}"),),
            is_stacked=True,
        ),
        Panel(
            title="Lease left",
            about="A worker whose lease runs out counts as lost.",
            queries=(_query("skein_lease_remaining_seconds", "{{worker}}"),),
            unit=units.Seconds,
        ),
        Panel(
            title="Time in ops, by kind",
            about="Seconds of compute per second, over all workers.",
            queries=(_query(_rate("skein_worker_op_seconds_sum", "kind"), "{{kind}}"),),
            is_stacked=True,
        ),
        Panel(
            title="Bubble",
            about="Share of the last step in which a worker ran no op, and of the step that was planned.",
            queries=(
                _query("skein_planned_bubble_ratio", "{{worker}}, planned"),
                _query("skein_worker_bubble_ratio", "{{worker}}"),
            ),
            unit=units.PercentUnit,
        ),
        Panel(
            title="Microbatches in flight",
            about="Most at once between their forward and their backward pass in the newest step, as planned and held.",
            queries=(
                _query("skein_worker_slots", "{{worker}}, planned"),
                _query("skein_worker_peak_in_flight_microbatches", "{{worker}}"),
            ),
        ),
        Panel(
            title="Weight gradients put aside",
            about="Microbatches that wait for their weight op, where backwards are split.",
            queries=(_query("skein_worker_pending_microbatches", "{{worker}}"),),
        ),
        Panel(
            title="Activations",
            about="Most at once in a step between forward and backward, as planned and as held in the newest step; "
            "reckoned: microbatches by what one takes of memory.",
            queries=(
                _query('skein_activation_bytes{kind="planned"}', "{{worker}}, planned"),
                _query('skein_activation_bytes{kind="held"}', "{{worker}}"),
            ),
            unit=units.BytesIEC,
        ),
        Panel(
            title="Bytes put aside for weight gradients",
            about="What they are to be made of: most at once in the newest step, and now.",
            queries=(
                _query("skein_worker_peak_pending_bytes", "{{worker}}, peak"),
                _query("skein_worker_pending_bytes", "{{worker}}"),
            ),
            unit=units.BytesIEC,
        ),
        Panel(
            title="Ops that wait, by kind",
            about="They could run, and the worker is busy with another.",
            queries=(_query("sum by (kind) (skein_worker_queued_ops)", "{{kind}}"),),
            is_stacked=True,
        ),
        Panel(
            title="Jobs in the queue",
            about="Jobs that wait until workers are free for all their stages.",
            queries=(_query("skein_queue_jobs", "jobs"),),
        ),
        Panel(
            title="Time in the queue",
            about="Since when each of them has been waiting.",
            queries=(_query("skein_queue_waiting_seconds or vector(0)", "{{job}}"),),
            unit=units.Seconds,
        ),
        Panel(
            title="Stored, by namespace",
            about="Checkpoints of its jobs, wherever they lie.",
            queries=(_query("skein_stored_bytes", "{{namespace}}"),),
            unit=units.BytesIEC,
        ),
        Panel(
            title="Use of quotas",
            about="Share of what the operator lets a namespace take; nothing where nothing is bounded.",
            queries=(_query("skein_quota_used_ratio or vector(0)", "{{namespace}} {{quota}}"),),
            unit=units.PercentUnit,
        ),
    ),
)

_WIRE = Row(
    title="Wire",
    columns=2,
    panels=(
        Panel(
            title="Bytes per second, by link",
            about="Tensors from worker to worker, as sent.",
            queries=(_query(_rate("skein_link_bytes_total", "src, dst"), "{{src}} → {{dst}}"),),
            unit=units.BytesPerSecondIEC,
        ),
        Panel(
            title="Bytes per second, by kind",
            about="Boundary tensors (edge), those to shards of the output and gradients from them, rows of the input, "
            "and sums of gradients, over all workers.",
            queries=(_query(_rate("skein_worker_tensor_bytes_total", "kind"), "{{kind}}"),),
            unit=units.BytesPerSecondIEC,
            is_stacked=True,
        ),
        Panel(
            title="Links by way of relays",
            about="Directed pairs of workers that cannot dial each other, by who carries for them.",
            queries=(_query("skein_relayed_links or vector(0)", "{{relay}}"),),
        ),
        Panel(
            title="Bytes per second through relays",
            about="The coordinator's host, and workers that relay or are called back.",
            queries=(
                _query("rate(skein_relay_bytes_total[$__rate_interval])", "coordinator"),
                _query(_rate("skein_worker_relay_bytes_total", "worker"), "{{worker}}"),
            ),
            unit=units.BytesPerSecondIEC,
        ),
        Panel(
            title="Tensors held",
            about="Boundary tensors and shards that workers keep until their step commits.",
            queries=(_query("skein_worker_payload_bytes", "{{worker}}"),),
            unit=units.BytesIEC,
        ),
        Panel(
            title="Calls refused by the coordinator",
            about="By method and reason.",
            queries=(
                _query(
                    f"{_rate('skein_rpc_errors_total', 'method, reason')} or vector(0)",
                    "{{method}} {{reason}}",
                ),
            ),
            unit=units.RequestsPerSecond,
        ),
        Panel(
            title="Calls that failed and tensors that were refused, at workers",
            about="By reason. An older generation's tensors are refused after each change of plan; that is no fault.",
            queries=(
                _query(
                    f"{_rate('skein_worker_rpc_errors_total', 'reason')} or vector(0)", "failed {{reason}}"
                ),
                _query(
                    f"{_rate('skein_worker_refusals_total', 'reason')} or vector(0)", "refused {{reason}}"
                ),
            ),
            unit=units.RequestsPerSecond,
        ),
    ),
)

_AGGREGATION = Row(
    title="Aggregation",
    columns=2,
    panels=(
        Panel(
            title="Aggregation bytes per second, by rule",
            about="Gradients, parameters and changes that workers send each other, as they travel.",
            queries=(_query(_rate("skein_aggregation_bytes_total", "rule"), "{{rule}}"),),
            unit=units.BytesPerSecondIEC,
            is_stacked=True,
        ),
        Panel(
            title="Aggregation bytes per second, by link",
            about="The same, from worker to worker.",
            queries=(_query(_rate("skein_aggregation_bytes_total", "src, dst"), "{{src}} → {{dst}}"),),
            unit=units.BytesPerSecondIEC,
        ),
        Panel(
            title="Aggregation bytes per step",
            about="Of all workers together, over all jobs: what the rule is chosen for.",
            queries=(
                _query(
                    "sum(rate(skein_aggregation_bytes_total[$__rate_interval]))"
                    " / sum(rate(skein_committed_steps_total[$__rate_interval]))"
                ),
            ),
            unit=units.BytesIEC,
        ),
        Panel(
            title="Compression",
            about="How many times fewer bytes the newest exchange took than in float32.",
            queries=(_query("skein_compression_ratio", "{{worker}}"),),
        ),
        Panel(
            title="Consensus distance",
            about="How far walkers are from the mean that they are drawn to, or from their leader, by stage: "
            "it should level off, not grow.",
            queries=(
                _query("max by (stage) (skein_consensus_distance)", "stage {{stage}} farthest"),
                _query("avg by (stage) (skein_consensus_distance)", "stage {{stage}} mean"),
            ),
        ),
        Panel(
            title="Error feedback",
            about="Norm of what was rounded away and is still to be sent, by stage: it should level off, not grow.",
            queries=(_query("max by (stage) (skein_error_feedback_norm)", "stage {{stage}}"),),
        ),
        Panel(
            title="Probe scores",
            about="Loss of each walker on the probe batch, per token; the least leads.",
            queries=(_query("skein_probe_score_nats", "{{walker}}"),),
        ),
        Panel(
            title="Leader changes",
            about="How often a worker's leader became another, over an hour.",
            queries=(
                _query(
                    "max by (worker) (increase(skein_leader_changes_total[1h])) or vector(0)", "{{worker}}"
                ),
            ),
        ),
    ),
)

_RECOVERY = Row(
    title="Checkpoints and recovery",
    columns=2,
    panels=(
        Panel(
            title="Checkpoint age",
            about="Since the newest checkpoint of each job; stands still when the job has ended.",
            queries=(_query("skein_checkpoint_age_seconds", "{{job}}"),),
            unit=units.Seconds,
        ),
        Panel(
            title="Checkpoint writing",
            about="Mean time that a stage took, in the background.",
            queries=(
                _query(
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
                _query("skein_checkpoints_total", "{{job}} checkpoints"),
                _query("skein_generations_total", "{{job}} plans"),
                _query("skein_rollbacks_total", "{{job}} rollbacks"),
            ),
        ),
        Panel(
            title="Checkpoint bytes",
            about="Written by each worker since it started.",
            queries=(_query("skein_worker_checkpoint_bytes_total", "{{worker}}"),),
            unit=units.BytesIEC,
        ),
    ),
)

_INCIDENTS = Row(
    title="Incidents",
    columns=3,
    panels=(
        Panel(
            title="Incidents, by kind",
            about="Failures that are over, all jobs together: what failed.",
            queries=(_query("sum by (kind) (skein_incidents_total)", "{{kind}}"),),
            is_stacked=True,
        ),
        Panel(
            title="Incidents, by remedy",
            about="What became of the step in progress; only a rollback costs committed steps.",
            queries=(_query("sum by (remedy) (skein_incidents_total)", "{{remedy}}"),),
            is_stacked=True,
        ),
        Panel(
            title="Until work went on",
            about="From the notice of a failure, over all that the run log has; 0 where there was none.",
            queries=tuple(
                _query(f"{_quantile_so_far(share, 'skein_incident_seconds')} >= 0 or vector(0)", legend)
                for share, legend in ((0.5, "50 %"), (0.99, "99 %"))
            ),
            unit=units.Seconds,
        ),
        Panel(
            title="Quarantined workers",
            about="Workers that others have shown to contribute wrongly, all jobs together.",
            queries=(_query("sum(skein_quarantined_workers_total) or vector(0)", "workers"),),
        ),
        Panel(
            title="Time in recovery",
            about="All incidents added up, by kind.",
            queries=(_query("sum by (kind) (skein_incident_seconds_sum)", "{{kind}}"),),
            unit=units.Seconds,
            is_stacked=True,
        ),
        Panel(
            title="Lost and repeated",
            about="Committed steps that were lost, and samples that were computed again.",
            queries=(
                _query("skein_incident_steps_lost_total", "steps lost"),
                _query("skein_samples_repeated_total", "samples repeated"),
            ),
        ),
        Panel(
            title="Rerouted and replayed",
            about="Hops that got another worker, and contributions of one stage that were computed again.",
            queries=(
                _query("skein_hops_rerouted_total", "hops rerouted"),
                _query("skein_contributions_replayed_total", "contributions replayed"),
            ),
        ),
    ),
)

_COORDINATOR = Row(
    title="Coordinator",
    columns=3,
    panels=(
        Panel(
            title="Event loop",
            about="How late a timer fires. Above 0.1 s leases are in danger.",
            queries=(_query("skein_event_loop_lag_seconds", "lag"),),
            unit=units.Seconds,
        ),
        Panel(
            title="Run log append",
            about="Until a turn's records were on disk; nothing is sent before.",
            queries=(
                _query(_mean("skein_run_log_append_seconds", "instance"), "mean"),
                _query(_quantile(0.99, "skein_run_log_append_seconds", "le"), "99 %"),
            ),
            unit=units.Seconds,
        ),
        Panel(
            title="Plans",
            about="Answers of the planner, and their mean time.",
            queries=(
                _query("sum by (result) (skein_plans_total)", "{{result}}"),
                _query("skein_plan_seconds_sum / skein_plan_seconds_count", "mean seconds"),
            ),
        ),
        Panel(
            title="Epoch and generation",
            about="Openings of the run log, and the newest plan's number.",
            queries=(_query("skein_epoch_number", "epoch"), _query("skein_generation_number", "generation")),
        ),
        Panel(
            title="Control streams",
            about="One for each worker that is connected.",
            queries=(_query("skein_control_streams", "open"),),
        ),
        Panel(
            title="Room for the run log",
            about="Share of the state directory's disk that is free; without room nothing more is committed.",
            unit=units.PercentUnit,
            queries=(_query("skein_state_free_bytes / skein_state_size_bytes", "free"),),
        ),
        Panel(
            title="Scrapes that succeed",
            about="1 while Prometheus reaches the coordinator, or hears of the worker by way of it.",
            queries=(_query('up{service=~"coordinator|worker"}', "{{service}} {{instance}}"),),
        ),
    ),
)

BOARDS = (
    Board(
        name="training",
        title="Skein: training",
        about="What is trained, how well and how fast. Vertical lines: new plans.",
        rows=(_AT_A_GLANCE, _TRAINING, _PLAN, _AGGREGATION),
    ),
    Board(
        name="fleet",
        title="Skein: fleet",
        about="Who is here, and what keeps each worker busy or idle.",
        rows=(_WORKERS,),
    ),
    Board(
        name="incidents",
        title="Skein: incidents",
        about="What failed, what was done about it, what it cost, and what could be gone back to.",
        rows=(_INCIDENTS, _RECOVERY),
    ),
    Board(
        name="network",
        title="Skein: network",
        about="What travels between workers, and what was refused.",
        rows=(_WIRE,),
    ),
    Board(
        name="coordinator",
        title="Skein: coordinator",
        about="Whether the service that decides is well: its loop, its log, its disk, its plans.",
        rows=(_COORDINATOR,),
    ),
)
"""Dashboards, by who looks; the first is the home page."""
PLAN_CHANGES = "changes(skein_generation_number[$__rate_interval]) > 0"
