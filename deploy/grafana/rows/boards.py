"""What the dashboards show, panel by panel: `BOARDS`. Drawn by `dashboard.py`.

Rules of this package
- Rows stand in the file of their concern; each expression stands there as Prometheus will see it.
- Expressions use metrics of the coordinator's page and Grafana's `$__rate_interval`, and no other variable: whoever
  replaces that one can ask Prometheus every question of the dashboard. `make compose-test` does.
- What nobody counted yet has no series; where that is good news, the expression ends in `or vector(0)`.
"""

from deploy.grafana.rows.aggregation import AGGREGATION
from deploy.grafana.rows.arrays import ARRAYS
from deploy.grafana.rows.choices import CHOICES
from deploy.grafana.rows.coordinator import COORDINATOR
from deploy.grafana.rows.incidents import INCIDENTS, RECOVERY
from deploy.grafana.rows.meshes import MESHES
from deploy.grafana.rows.panel import Board
from deploy.grafana.rows.training import AT_A_GLANCE, PLAN, TRAINING
from deploy.grafana.rows.wire import WIRE
from deploy.grafana.rows.workers import WORKERS

BOARDS = (
    Board(
        name="training",
        title="Skein: training",
        about="What is trained, how well and how fast. Vertical lines: new plans.",
        rows=(AT_A_GLANCE, TRAINING, PLAN, AGGREGATION, CHOICES, ARRAYS),
    ),
    Board(
        name="fleet",
        title="Skein: fleet",
        about="Who is here, and what keeps each worker busy or idle.",
        rows=(WORKERS, MESHES),
    ),
    Board(
        name="incidents",
        title="Skein: incidents",
        about="What failed, what was done about it, what it cost, and what could be gone back to.",
        rows=(INCIDENTS, RECOVERY),
    ),
    Board(
        name="network",
        title="Skein: network",
        about="What travels between workers, and what was refused.",
        rows=(WIRE,),
    ),
    Board(
        name="coordinator",
        title="Skein: coordinator",
        about="Whether the service that decides is well: its loop, its log, its disk, its plans.",
        rows=(COORDINATOR,),
    ),
)
"""Dashboards, by who looks; the first is the home page."""
PLAN_CHANGES = "changes(skein_generation_number[$__rate_interval]) > 0"
