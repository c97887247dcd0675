import zmq

from lightning_sdpipe.scheduler.server.server import MOST_AT_ONCE, _messages


def test_messages_that_wait_come_one_after_the_other_and_so_many_at_once() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.ROUTING_ID, b"peer")
        router.bind("inproc://scheduler")
        dealer.connect("inproc://scheduler")
        sent = [b"%d" % number for number in range(MOST_AT_ONCE + 2)]
        for frame in sent:
            dealer.send(frame)
        dealer.send_multipart([b"more", b"than", b"one"])
        dealer.send(b"last")
        first, second = list(_messages(router, 1.0)), list(_messages(router, 1.0))
        assert first + second == [(b"peer", frame) for frame in [*sent, b"", b"last"]]
        assert len(first) == MOST_AT_ONCE
        assert list(_messages(router, 0.0)) == []
