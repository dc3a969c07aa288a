"""A gRPC server that implements Qdrant's protocol in front of the client's in-memory mode.

It tests our requests and how we handle failures, over a real connection. It is not Qdrant: it has
no graph, no disk and no optimizer.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message
from qdrant_client import QdrantClient
from qdrant_client import grpc as proto
from qdrant_client.conversions.conversion import GrpcToRest, RestToGrpc
from qdrant_client.grpc.collections_service_pb2_grpc import (
    CollectionsServicer,
    add_CollectionsServicer_to_server,
)
from qdrant_client.grpc.points_service_pb2_grpc import PointsServicer, add_PointsServicer_to_server


class FakeQdrant(CollectionsServicer, PointsServicer):
    """``seen`` are the requests.

    The next calls fail with the codes of ``failures``, in order; calls of a kind in ``failures_of``
    always do.
    """

    def __init__(self) -> None:
        self.inner = QdrantClient(":memory:")
        self.seen: list[Message] = []
        self.keys: set[str] = set()
        self.failures: list[grpc.StatusCode] = []
        self.failures_of: dict[type[Message], grpc.StatusCode] = {}
        self.statuses: list[Any] = []  # of a collection, for its next status requests
        self.url = ""

    def requests(self, kind: type[Message]) -> list[Any]:
        return [request for request in self.seen if isinstance(request, kind)]

    def _enter(self, request: Any, context: grpc.ServicerContext) -> None:
        self.seen.append(request)
        self.keys |= {str(v) for k, v in context.invocation_metadata() if k == "api-key"}
        if self.failures:
            context.abort(self.failures.pop(0), "as the test asked")
        if type(request) in self.failures_of:
            context.abort(self.failures_of[type(request)], "as the test asked")

    # Collections

    def CollectionExists(self, request: Any, context: Any) -> Any:
        self._enter(request, context)
        exists = self.inner.collection_exists(request.collection_name)
        return proto.CollectionExistsResponse(result=proto.CollectionExists(exists=exists))

    def Create(self, request: Any, context: Any) -> Any:
        self._enter(request, context)
        self.inner.create_collection(
            request.collection_name,
            vectors_config=GrpcToRest.convert_vectors_config(request.vectors_config),
        )
        return proto.CollectionOperationResponse(result=True)

    def Update(self, request: Any, context: Any) -> Any:
        self._enter(request, context)
        return proto.CollectionOperationResponse(result=True)

    def Get(self, request: Any, context: Any) -> Any:
        """Both services have a ``Get``: one for a collection's state, one for points."""
        self._enter(request, context)
        if isinstance(request, proto.GetPoints):
            ids = [GrpcToRest.convert_point_id(identity) for identity in request.ids]
            found = self.inner.retrieve(request.collection_name, ids, with_payload=False)
            there = [RestToGrpc.convert_extended_point_id(point.id) for point in found]
            return proto.GetResponse(result=[proto.RetrievedPoint(id=i) for i in there])
        info = RestToGrpc.convert_collection_info(
            self.inner.get_collection(request.collection_name)
        )
        if self.statuses:
            info.status = self.statuses.pop(0)
        return proto.GetCollectionInfoResponse(result=info)

    # Points

    def Upsert(self, request: Any, context: Any) -> Any:
        self._enter(request, context)
        points = [GrpcToRest.convert_point_struct(point) for point in request.points]
        self.inner.upsert(request.collection_name, points)
        return proto.PointsOperationResponse(result=proto.UpdateResult(status=proto.Completed))

    def Count(self, request: Any, context: Any) -> Any:
        self._enter(request, context)
        count = self.inner.count(request.collection_name).count
        return proto.CountResponse(result=proto.CountResult(count=count))

    def QueryBatch(self, request: Any, context: Any) -> Any:
        self._enter(request, context)
        queries = [
            GrpcToRest.convert_query_points(q).model_copy(update={"params": None})
            for q in request.query_points
        ]
        replies = self.inner.query_batch_points(request.collection_name, queries)
        return proto.QueryBatchResponse(
            result=[
                proto.BatchResult(result=[RestToGrpc.convert_scored_point(p) for p in reply.points])
                for reply in replies
            ]
        )


@contextmanager
def serving_qdrant() -> Iterator[FakeQdrant]:
    fake = FakeQdrant()
    server = grpc.server(ThreadPoolExecutor(2))
    add_CollectionsServicer_to_server(fake, server)
    add_PointsServicer_to_server(fake, server)
    fake.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield fake
    finally:
        server.stop(None).wait()
