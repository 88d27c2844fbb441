"""The service takes requests of several threads, in turns between clients, and ends cleanly."""

import queue
import random
import resource
import threading

import jax
import pytest
from served import FLOAT32, engine_of, made, random_request, small_llama

from lmlib.generate import GREEDY
from lmlib.serve import Engine, Full, Request, Service


class Client:
    """Collects the updates of one request."""

    def __init__(self, service, request, model="small"):
        self.updates, self._ended = [], threading.Event()
        self.first = threading.Event()
        self.cancel = service.submit(model, request, self._receive)

    def _receive(self, update):
        self.updates.append(update)
        self.first.set()
        if update.ended:
            self._ended.set()

    def end(self):
        assert self._ended.wait(300)
        return self.updates[-1].ended

    @property
    def tokens(self):
        return [token.id for update in self.updates for token in update.tokens]


class Gate:
    """Stops the thread of the engines, in an answer that it delivers, until it is opened."""

    def __init__(self, service, model="small"):
        self._reached, self._opened = threading.Event(), threading.Event()
        service.submit(model, request(), self._receive)
        assert self._reached.wait(300)

    def _receive(self, update):
        self._reached.set()
        assert self._opened.wait(300)

    def open(self):
        self._opened.set()


def request(count=6, prompt=(1, 2, 3), **others):
    return Request(tuple(prompt), count, GREEDY, 0, **others)


@pytest.fixture
def service():
    made = Service({"small": engine_of(small_llama, slots=2)}, waiting=6)
    yield made
    made.close(finish=False)


def test_requests_of_many_threads_get_their_own_answers(service):
    prompts = [(n, n + 1) for n in range(8)]
    found = queue.Queue()

    def ask(prompt):
        client = Client(service, request(prompt=prompt))
        found.put((prompt, client.end(), client.tokens))

    for some in (prompts[:4], prompts[4:]):
        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in some]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    answers = {prompt: tokens for prompt, _, tokens in found.queue}
    for prompt in prompts:
        assert Client(service, request(prompt=prompt)).end() == "length"
        alone = Client(service, request(prompt=prompt))
        alone.end()
        assert answers[prompt] == alone.tokens


def test_clients_take_turns(service):
    """One client's four requests came before the other's two, which end second and fourth."""
    order = queue.Queue()

    def submit(client):
        def receive(update):
            if update.ended:
                order.put(client)

        service.submit("small", request(client=client), receive)

    gate = Gate(service)
    for client in ("many",) * 4 + ("few",) * 2:
        submit(client)
    gate.open()
    ended = [order.get(timeout=300) for _ in range(6)]
    assert ended[:4].count("few") == 2 and ended[4:] == ["many", "many"]


def test_a_full_queue_refuses_and_says_when_to_come_back(service):
    gate = Gate(service)
    clients = [Client(service, request()) for _ in range(6)]
    with pytest.raises(Full, match="6 requests wait already") as refused:
        service.submit("small", request(), lambda update: None)
    assert 1 <= refused.value.retry_after <= 600
    assert service.load()["small"].waiting == 6
    gate.open()
    assert {each.end() for each in clients} == {"length"}
    load = service.load()["small"]
    assert (load.waiting, load.slots) == (0, 2) and load.tokens >= 36


def test_cancelled_requests_end_and_free_their_slots(service):
    gate = Gate(service)
    waiting = Client(service, request())
    waiting.cancel()
    gate.open()
    assert waiting.end() == "cancelled" and not waiting.tokens
    running = [Client(service, request(400)) for _ in range(2)]
    for each in running:
        assert each.first.wait(300)
        each.cancel()
    assert [each.end() for each in running] == ["cancelled"] * 2
    assert all(len(each.tokens) < 400 for each in running)
    assert Client(service, request()).end() == "length"
    running[0].cancel()  # has ended already


@pytest.mark.parametrize("finish", [True, False])
def test_closing_ends_every_answer(finish):
    service = Service({"small": engine_of(small_llama, slots=2)})
    running = Client(service, request(300))
    assert running.first.wait(300)
    waiting = [Client(service, request(300)) for _ in range(3)]
    service.close(finish)
    assert running.end() == ("length" if finish else "cancelled")
    assert all(each.end() in ("cancelled", "length") for each in waiting)
    assert waiting[-1].end() == "cancelled"
    with pytest.raises(RuntimeError, match="shutting down"):
        service.submit("small", request(), lambda update: None)


def test_a_receiver_that_raises_is_cancelled_alone(service):
    def receive(update):
        raise OSError("gone")

    service.submit("small", request(400), receive)
    assert Client(service, request()).end() == "length"
    assert service.load()["small"].tokens < 300


def test_models_are_served_side_by_side():
    engines = {name: engine_of(small_llama, slots=2) for name in ("one", "two")}
    service = Service(engines)
    clients = [Client(service, request(), name) for name in ("one", "two", "one")]
    assert {each.end() for each in clients} == {"length"}
    assert {name: load.tokens for name, load in service.load().items()} == {"one": 12, "two": 6}
    with pytest.raises(ValueError, match=r"no model 'three' \(known: one, two\)"):
        service.submit("three", request(), lambda update: None)
    service.close(finish=True)


@pytest.mark.landing
def test_a_step_that_fails_ends_its_answers_alone():
    def fails(tokens):
        if (tokens == 13).any():
            raise RuntimeError("an unlucky token")
        return tokens

    model = made(small_llama)

    class Unlucky(type(model)):
        def trunk(self, tokens_BS, context, cache=None):
            shape = jax.ShapeDtypeStruct(tokens_BS.shape, tokens_BS.dtype)
            tokens_BS = jax.pure_callback(fails, shape, tokens_BS)
            return super().trunk(tokens_BS, context, cache)

    unlucky = object.__new__(Unlucky)
    for name, value in vars(model).items():
        object.__setattr__(unlucky, name, value)
    engine = Engine(unlucky, None, FLOAT32, slots=2, length=64, prefix_rows=0)
    service = Service({"small": engine})
    before = Client(service, request())
    assert before.end() == "length"
    client = Client(service, request(prompt=(1, 13)))
    assert client.end().startswith("failed: ")
    after = Client(service, request())
    assert after.end() == "length" and after.tokens == before.tokens

    failed = queue.Queue()

    def leave(update):
        if not update.ended:
            service.submit("small", request(prompt=(1, 13)), failed.put)
            raise OSError("gone")  # this answer ends in the turn that fails

    service.submit("small", request(40), leave)
    assert failed.get(timeout=300).ended.startswith("failed: ")
    closing = threading.Thread(target=service.close, args=(True,), daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing_behind():
    engine = engine_of(small_llama)
    service = Service({"small": engine}, waiting=64)
    rng, places = random.Random(0), threading.Semaphore(60)
    ends = queue.Queue()

    def ask(count):
        for _ in range(count):
            assert places.acquire(timeout=300)
            ended = threading.Event()

            def receive(update, ended=ended):
                if update.ended:
                    ended.set()
                    ends.put(update.ended)
                    places.release()

            asked = random_request(rng, client=str(rng.randrange(3)))
            cancel = service.submit("small", asked, receive)
            if rng.random() < 0.3:
                cancel()

    ask(1_000)
    for _ in range(60):
        assert places.acquire(timeout=300)
    places.release(60)
    arrays, memory = len(jax.live_arrays()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ask(9_000)
    for _ in range(60):
        assert places.acquire(timeout=300)
    load = service.load()["small"]
    assert (load.running, load.prefilling, load.waiting) == (0, 0, 0) and load.prefix_rows <= 3
    assert ends.qsize() == 10_000 and {*ends.queue} <= {"length", "stop", "cancelled"}
    assert len(jax.live_arrays()) <= arrays + 5
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert grown < 50_000, f"{grown:,} kB more"
    service.close(finish=True)
