"""The pairs of domain types and messages; everything that crosses a process border goes through here.

`X.encode(value)` gives the message, `X.decode(message)` the value or `RemoteError`. Requests of `Jobs` that carry only
an id have no dataclass and are used as they are.

Each codec names its type and imports it at its first use: a command that lists jobs has no use for plans and job files.
"""

from typing import TYPE_CHECKING

from skein.wire.mapping import Codec
from skein.wire.v1 import (
    checkpoint_pb2,
    control_pb2,
    identity_pb2,
    ids_pb2,
    jobs_pb2,
    log_pb2,
    peer_pb2,
    relay_pb2,
)

if TYPE_CHECKING:
    from skein.protocol.log.records import Incident, Record
    from skein.topology.fleet import Link
    from skein.wire import extra, greeting, views


REPORT: "Codec[extra.Upward, control_pb2.Report]" = Codec("skein.wire.extra.Upward", control_pb2.Report)
DIRECTIVE: "Codec[extra.Downward, control_pb2.Directive]" = Codec(
    "skein.wire.extra.Downward", control_pb2.Directive
)
RECORD: "Codec[Record, log_pb2.Record]" = Codec(
    "skein.protocol.log.records.Record", log_pb2.Record, is_ours=True
)

TENSOR_PART: "Codec[extra.TensorPart, peer_pb2.TensorPart]" = Codec(
    "skein.wire.extra.TensorPart", peer_pb2.TensorPart
)
PART_REPLY: "Codec[extra.PartReply, peer_pb2.PartReply]" = Codec(
    "skein.wire.extra.PartReply", peer_pb2.PartReply
)
FETCH_STATE: "Codec[extra.FetchStateRequest, peer_pb2.FetchStateRequest]" = Codec(
    "skein.wire.extra.FetchStateRequest", peer_pb2.FetchStateRequest
)
STATE_PART: "Codec[extra.StatePart, peer_pb2.StatePart]" = Codec(
    "skein.wire.extra.StatePart", peer_pb2.StatePart
)
PROBE_PART: "Codec[extra.ProbePart, peer_pb2.ProbePart]" = Codec(
    "skein.wire.extra.ProbePart", peer_pb2.ProbePart
)
PROBE_REPLY: "Codec[extra.ProbeReply, peer_pb2.ProbeReply]" = Codec(
    "skein.wire.extra.ProbeReply", peer_pb2.ProbeReply
)

PUT_PART: "Codec[extra.PutPart, checkpoint_pb2.PutPart]" = Codec(
    "skein.wire.extra.PutPart", checkpoint_pb2.PutPart
)
PUT_REPLY: "Codec[extra.PutReply, checkpoint_pb2.PutReply]" = Codec(
    "skein.wire.extra.PutReply", checkpoint_pb2.PutReply
)
GET_REQUEST: "Codec[extra.GetRequest, checkpoint_pb2.GetRequest]" = Codec(
    "skein.wire.extra.GetRequest", checkpoint_pb2.GetRequest
)
GET_PART: "Codec[extra.GetPart, checkpoint_pb2.GetPart]" = Codec(
    "skein.wire.extra.GetPart", checkpoint_pb2.GetPart
)
MANIFEST_REQUEST: "Codec[extra.ManifestRequest, checkpoint_pb2.ManifestRequest]" = Codec(
    "skein.wire.extra.ManifestRequest", checkpoint_pb2.ManifestRequest
)
MANIFEST_REPLY: "Codec[extra.ManifestReply, checkpoint_pb2.ManifestReply]" = Codec(
    "skein.wire.extra.ManifestReply", checkpoint_pb2.ManifestReply
)

CHECKPOINT_VIEW: "Codec[views.CheckpointView, checkpoint_pb2.CheckpointView]" = Codec(
    "skein.wire.views.CheckpointView", checkpoint_pb2.CheckpointView
)

SUBMIT_REPLY: "Codec[views.SubmitReply, jobs_pb2.SubmitReply]" = Codec(
    "skein.wire.views.SubmitReply", jobs_pb2.SubmitReply
)
KNOWN_IDENTITY: "Codec[views.KnownIdentity, identity_pb2.KnownIdentity]" = Codec(
    "skein.wire.views.KnownIdentity", identity_pb2.KnownIdentity
)
VERSION_REPLY: "Codec[greeting.VersionReply, jobs_pb2.VersionReply]" = Codec(
    "skein.wire.greeting.VersionReply", jobs_pb2.VersionReply
)
PAGE_LINK: "Codec[views.PageLink, jobs_pb2.PageLink]" = Codec("skein.wire.views.PageLink", jobs_pb2.PageLink)
JOB_STATUS: "Codec[views.JobStatus, jobs_pb2.JobStatus]" = Codec(
    "skein.wire.views.JobStatus", jobs_pb2.JobStatus
)
WORKER_STATUS: "Codec[views.WorkerStatus, jobs_pb2.WorkerStatus]" = Codec(
    "skein.wire.views.WorkerStatus", jobs_pb2.WorkerStatus
)
JOB_EVENT: "Codec[views.JobEvent, jobs_pb2.JobEvent]" = Codec("skein.wire.views.JobEvent", jobs_pb2.JobEvent)
LINK: "Codec[Link, ids_pb2.Link]" = Codec("skein.topology.fleet.Link", ids_pb2.Link)

LISTEN_REQUEST: "Codec[extra.ListenRequest, relay_pb2.ListenRequest]" = Codec(
    "skein.wire.extra.ListenRequest", relay_pb2.ListenRequest
)
INCOMING: "Codec[extra.Incoming, relay_pb2.Incoming]" = Codec("skein.wire.extra.Incoming", relay_pb2.Incoming)
CARRY_PART: "Codec[extra.CarryPart, relay_pb2.CarryPart]" = Codec(
    "skein.wire.extra.CarryPart", relay_pb2.CarryPart
)
INCIDENT: "Codec[Incident, log_pb2.Incident]" = Codec("skein.protocol.log.records.Incident", log_pb2.Incident)
