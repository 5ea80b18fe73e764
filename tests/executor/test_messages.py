"""Every message arrives as it was sent, and a reply is used only for what it answers."""

import multiprocessing
import os
import pickle
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.channel import _LENGTH, PipeChannel, open_end, pipe_ends, queue_channels
from executor.draft_client import DraftClient, DraftFailed
from executor.mailbox import STORES_ARE_SEEN_IN_ORDER, Mailbox, shared_memory
from executor.messages import Ask, Built, Call, Fault, Reply, Result, from_bytes, to_bytes
from executor.sequence import Question, Verified
from executor.speculation_cache import Speculation
from sim.errors import BadInput
from sim.policy import Proposer, Speculative, SpeculativeSpeculative
from sim.trace import Outcome, Source

outcomes = st.builds(Outcome, st.integers(0, 40), st.integers(0, 2**31))
since = st.lists(st.integers(0, 2**31), max_size=3).map(tuple)
verified = st.dictionaries(st.integers(0, 15), st.builds(Verified, outcomes, st.integers(0, 9999), since), min_size=1)
policies = st.sampled_from([Speculative(3), SpeculativeSpeculative(2, (1, 2, 3), (0, 1, 0))])


def speculation(source: Source, proposer: Proposer, num_tokens: int, vocab_size: int) -> Speculation:
    tokens = tuple(range(num_tokens))
    probs = torch.rand(num_tokens, vocab_size, dtype=torch.float64) if vocab_size and num_tokens else None
    return Speculation(source, tokens, probs, proposer)


speculations = st.builds(
    speculation, st.sampled_from(Source), st.sampled_from(Proposer), st.integers(0, 9), st.sampled_from([0, 1, 7])
)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(0, 2**40), verified, policies, st.booleans(), st.data())
def test_asks_and_replies_survive_a_pipe(number: int, rows: dict, policy, tells_build: bool, data) -> None:
    sent_ask = Ask(number, Question(policy, rows), tells_build)
    ask = from_bytes(to_bytes(sent_ask))
    assert ask == sent_ask and list(ask.question.verified) == list(rows)
    sent = Reply(number, rows, {row: data.draw(speculations) for row in rows}, draft_s=0.25)
    received = from_bytes(to_bytes(sent))
    assert (received.number, received.verified, received.draft_s) == (number, rows, 0.25)
    for row, own in sent.speculations.items():
        other = received.speculations[row]
        assert (own.source, own.tokens, own.proposer) == (other.source, other.tokens, other.proposer)
        assert (own.draft_probs is None) == (other.draft_probs is None)
        assert own.draft_probs is None or torch.equal(own.draft_probs, other.draft_probs)


@pytest.mark.parametrize(
    "message",
    [
        Call(3, "score", ([1],), {"num_rows": 2}),
        Result(3, {"pid": 1}),
        Built(4, 0.5),
    ],
)
def test_other_messages_survive_too(message) -> None:
    assert from_bytes(to_bytes(message)) == message
    assert pickle.loads(pickle.dumps(message)) == message


@pytest.mark.parametrize("error", [BadInput("pair: draft", "must be: there", [1]), DraftFailed("it failed")])
def test_a_fault_arrives_as_the_exception_that_it_was(error) -> None:
    received = from_bytes(to_bytes(Fault(error)))
    assert isinstance(received, Fault)
    assert type(received.error) is type(error) and str(received.error) == str(error)


class ScriptedClient(DraftClient):
    """A client whose draft the test plays by hand."""

    def __init__(self) -> None:
        own_end, self.draft = queue_channels()
        super().__init__(own_end, answer_timeout_s=0.05)

    worked_s = iter(())  # what `_worked_s` says in turn, then always the same

    def _worked_s(self) -> float:
        return next(self.worked_s, 0.0)

    def _how_it_died(self) -> str:
        return "dead"

    def _give_up(self) -> str:
        return "was given up"

    def close(self) -> None:
        self._channel.close()


RIGHT = Speculation(Source.HIT, (1, 2, 3))
WRONG = Speculation(Source.HIT, (9, 9, 9))
ROWS = {0: Verified(Outcome(2, 7), 20), 1: Verified(Outcome(0, 4), 18)}
QUESTION = Question(Speculative(3), ROWS)


def answers(rows: dict, own: Speculation) -> dict[int, Speculation]:
    return dict.fromkeys(rows, own)


def strays() -> list:
    """Replies to another request, or to another accepted count, bonus token, row or number of rows."""
    others = [
        ROWS | {0: Verified(Outcome(1, 7), 20)},
        ROWS | {1: Verified(Outcome(0, 5), 18)},
        {0: ROWS[0]},
        ROWS | {2: Verified(Outcome(0, 4), 18)},
        ROWS | {1: Verified(Outcome(0, 4), 18, since=(2,))},
    ]
    late = [Reply(number, ROWS, answers(ROWS, WRONG)) for number in (1, 2)]
    return [*late, *(Reply(3, rows, answers(rows, WRONG)) for rows in others), Result(2, None), Result(3, None)]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.permutations([*range(len(strays())), None]))
def test_a_reply_to_something_else_is_never_used(order) -> None:
    """`order` holds the right reply, None, among strays."""
    client = ScriptedClient()
    client._number = 2
    for place in order:
        client.draft.send(Reply(3, ROWS, answers(ROWS, RIGHT)) if place is None else strays()[place])
    assert client.speculate(QUESTION) == answers(ROWS, RIGHT)
    client.draft.send(Reply(3, ROWS, answers(ROWS, WRONG)))  # the same request answered twice
    client.draft.send(Reply(4, ROWS, answers(ROWS, RIGHT)))
    assert client.speculate(QUESTION) == answers(ROWS, RIGHT)


def test_nothing_but_strays_is_no_answer() -> None:
    client = ScriptedClient()
    client._number = 2
    for stray in strays():
        client.draft.send(stray)
    with pytest.raises(DraftFailed, match=r"has not answered for 0.05 s and was given up"):
        client.speculate(QUESTION)


def test_results_come_in_the_order_of_the_calls() -> None:
    client = ScriptedClient()
    client._number, client._awaited = 6, type(client._awaited)()
    client.start("one")
    client.start("two")
    for number, value in ((6, "late"), (7, "one"), (7, "again"), (8, "two")):
        client.draft.send(Result(number, value))
    assert (client.result(), client.result()) == ("one", "two")


def test_what_does_nothing_is_not_waited_for() -> None:
    """Without a limit of time as long as something is done: here for three times the time to answer."""
    client = ScriptedClient()
    client.worked_s = iter((1.0, 2.0, 2.0, 3.0))  # before and after each wait
    with pytest.raises(DraftFailed, match=r"has done nothing for 0.05 s and was given up"):
        client.result()
    assert list(client.worked_s) == []
    client.draft.send(Result(0, "late"))
    client.start("more")
    with pytest.raises(DraftFailed, match="has done nothing"):
        client.result()


def test_a_failure_is_told_again_and_again() -> None:
    client = ScriptedClient()
    client.start("one")
    client.draft.send(Fault(DraftFailed("it broke")))
    client.draft.close()
    for _ in range(2):
        with pytest.raises(DraftFailed, match="it broke"):
            client.speculate(QUESTION)
    assert client.is_done()
    client.begin([])
    with pytest.raises(DraftFailed, match="it broke"):
        client.wait()


def test_a_closed_end_is_noticed_again_and_again() -> None:
    client = ScriptedClient()
    client.draft.close()
    for _ in range(2):
        with pytest.raises(DraftFailed, match="dead"):
            client.speculate(QUESTION)


def test_a_refusal_keeps_its_kind() -> None:
    client = ScriptedClient()
    client.draft.send(Fault(BadInput("pair", "is missing")))
    client.draft.close()
    for _ in range(2):
        with pytest.raises(BadInput, match="pair: is missing"):
            client.result() if client._awaited else client.speculate(QUESTION)


def two_ends(box_capacity: int | None) -> list[PipeChannel]:
    """Of a pipe, with mailboxes of so many bytes if any."""
    here, there = multiprocessing.Pipe()
    if box_capacity is None:
        return [PipeChannel(here), PipeChannel(there)]
    memories = [shared_memory(box_capacity) for _ in range(2)]
    ways = [Mailbox(memories[0]), Mailbox(memories[1])], [Mailbox(memories[1]), Mailbox(memories[0])]
    return [PipeChannel(end, (inbox, outbox)) for end, (inbox, outbox) in zip((here, there), ways, strict=True)]


@pytest.fixture(params=[None, 200], ids=["pipe", "mailboxes"])
def pipe(request):
    ends = two_ends(request.param)
    yield ends
    for end in ends:
        end.close()


LONG = Result(1, bytes(2**21))  # many times what a pipe holds


def test_two_ends_that_send_at_once_do_not_wait_for_each_other(pipe) -> None:
    received = []

    def exchange(end: PipeChannel) -> None:
        end.send(LONG)
        received.append(end.receive())

    other = threading.Thread(target=exchange, args=pipe[:1])
    other.start()
    exchange(pipe[1])
    other.join()
    assert received == [LONG, LONG]


def test_what_a_full_pipe_holds_back_is_not_lost(pipe) -> None:
    """The second attempt begins with what the first one left."""
    with pytest.raises(TimeoutError):
        pipe[0].send(LONG, timeout_s=0.02)
    sender = threading.Thread(target=pipe[0].send, args=(Result(2, "short"),))
    sender.start()
    assert [pipe[1].receive(), pipe[1].receive()] == [LONG, Result(2, "short")]
    sender.join()


def test_half_a_message_is_waited_for_no_longer_than_told(pipe) -> None:
    data = to_bytes(Result(1, "whole"))
    written = _LENGTH.pack(len(data)) + data
    os.write(pipe[0]._fd, written[:-3])
    assert not pipe[1].is_ready() and pipe[1].peek() is None
    with pytest.raises(TimeoutError):
        pipe[1].receive(timeout_s=0.05)
    os.write(pipe[0]._fd, written[-3:])
    assert pipe[1].receive() == Result(1, "whole")


def test_an_end_is_found_behind_what_was_sent(pipe) -> None:
    pipe[1].send(Result(7, "never read"))
    pipe[0].send(Result(1, "last"))
    pipe[0].close()
    assert pipe[1].receive() == Result(1, "last")
    assert pipe[1].is_ready()
    for _ in range(2):
        with pytest.raises(EOFError):
            pipe[1].receive()
    with pytest.raises(BrokenPipeError):
        pipe[1].send(LONG)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.one_of(st.none(), st.integers(0, 400)), max_size=12), st.booleans())
def test_messages_come_in_order_by_whichever_way(steps: list, peeks: bool) -> None:
    """Some go through the mailbox, those that find it taken or too small through the pipe. None: the reader reads."""
    here, there = two_ends(200)
    sent, received = [], []
    try:
        for size in steps:
            if size is None:
                if peeks:
                    there.peek()
                received += [there.receive()] if there.is_ready() else []
            else:
                sent.append(Result(len(sent), bytes(size)))
                here.send(sent[-1])
        while there.is_ready():
            received.append(there.receive())
        assert received == sent
        with pytest.raises(TimeoutError):
            there.receive(timeout_s=0.0)
    finally:
        here.close()
        there.close()


def test_a_sleeper_is_woken_by_what_lies_in_its_mailbox() -> None:
    here, there = two_ends(200)
    received = []
    reader = threading.Thread(target=lambda: received.extend(there.receive(timeout_s=60.0) for _ in range(2)))
    reader.start()
    try:
        for number in range(2):
            while not there._inbox.reader_sleeps:
                time.sleep(0.005)
            here.send(Result(number, None))
            while len(received) == number and reader.is_alive():
                time.sleep(0.005)
        reader.join()
        assert received == [Result(0, None), Result(1, None)]
        assert not there._unread and not there.is_ready()  # what woke it is gone
    finally:
        here.close()
        there.close()


def echo(end, num_messages: int) -> None:
    channel = open_end(end)
    for _ in range(num_messages):
        channel.send(channel.receive())


@pytest.mark.skipif(not STORES_ARE_SEEN_IN_ORDER, reason="processes use no mailboxes on this processor")
def test_nothing_is_torn_between_processes() -> None:
    """Each message comes back as it went, whatever lay in the mailbox before it."""
    own_end, other_end = pipe_ends()
    messages = [Result(number, bytes([number % 251]) * (number * 37 % 5000)) for number in range(2000)]
    process = multiprocessing.get_context("fork").Process(target=echo, args=(other_end, len(messages)))
    process.start()
    channel = open_end(own_end)
    try:
        for message in messages:
            channel.send(message)
            assert channel.receive(timeout_s=60.0) == message
    finally:
        channel.close()
        process.join()
    assert channel._num_received == len(messages)


def test_a_thread_sees_what_the_next_request_brings() -> None:
    here, there = queue_channels()
    assert there.peek() is None and not there.is_ready()
    sender = threading.Thread(target=here.send, args=(Ask(1, QUESTION),))
    sender.start()
    sender.join()
    assert there.is_ready()
    assert there.peek() == there.peek() == there.receive() == Ask(1, QUESTION)
    with pytest.raises(TimeoutError):
        there.receive(timeout_s=0.01)


def test_the_end_of_a_build_is_noted_whenever_it_comes() -> None:
    client = ScriptedClient()
    client._tells_builds = True
    question, works = Question(SpeculativeSpeculative(1, (1, 1), (1, 1)), ROWS), []
    for number in (1, 2):
        client.draft.send(Reply(number, ROWS, answers(ROWS, RIGHT), draft_s=0.5))
        if number == 2:  # the first build's end comes before the second answer
            client.draft.send(Built(2, 0.75))
        client.speculate(question)
        works.append(client.work)
        client.draft.send(Built(1, 0.25)) if number == 1 else None
    assert [work.draft_s for work in works] == [0.5, 0.5]
    assert [work.build_s for work in works] == [0.25, None]
    client.take_notice()
    assert works[1].build_s == 0.75
