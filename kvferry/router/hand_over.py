"""Hand-over of a request from a prefill engine to a decode engine: one sequence for all requests.

:meth:`HandOver.run` chooses the engines, has a prefill engine compute the prompt and has a decode
engine continue, in turn or both at once. If an attempt fails, KV that no engine fetched goes back
to its lender, and the sequence begins again::

    choose ──▶ prefill ──▶ decode ──▶ replies
      ▲           │           │
      └─ again ◀── give back ◀─┘

The state of the attempts is in the request: :mod:`kvferry.router.routed_request`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from kvferry.config import AtOnce
from kvferry.router import engine_client
from kvferry.router.engine_client import ClientError
from kvferry.router.engines import Engine
from kvferry.router.members import EnginePool, NoEngineError
from kvferry.router.queue import RequestQueue
from kvferry.router.replies import (
    EngineRefusedError,
    Reply,
)
from kvferry.router.routed_request import (
    TICKETS,
    Loan,
    RoutedRequest,
    StartAgainError,
    Told,
    unless_read,
)
from kvferry.serving.messages import Role
from kvferry.serving.openai import ApiError

_MOST_ASKED = 3
"""Maximum number of decode servers asked to give a loan back."""
_NO_MODEL = "kvferry-no-such-model"
"""Name of a model that no server has."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """The driver: runs requests over the two pools of engines."""

    prefill: EnginePool
    decode: EnginePool
    at_once: AtOnce = field(default="never", kw_only=True)
    """See :class:`~kvferry.config.RouterConfig`."""
    key: bytes | None = field(default=None, kw_only=True)
    """Cluster key of the engines; ``None`` for engines without a key."""
    lapsed: Callable[[], object] = field(default=lambda: None, kw_only=True)
    """Called for each loan that no engine fetched and no engine took back."""
    queue: RequestQueue | None = field(default=None, kw_only=True)
    """Requests that wait for room at the engines; ``None`` if engines have no limit."""
    waited: Callable[[float], object] = field(default=lambda _: None, kw_only=True)
    """Called with the seconds for which a request was in the queue."""

    def run(self, request: RoutedRequest[Told]) -> AsyncGenerator[Told, None]:
        """Yields the parts of the client's answer as they come. The request waits in the queue
        first, if there is one.

        Raises:
            ApiError: the queue is full; the request is refused or failed; or no engine is left.
        """
        if self.queue is None or request.place.priority is None:
            return self._attempts(request)
        return self._queued(request, self.queue)

    async def _queued(
        self, request: RoutedRequest[Told], queue: RequestQueue
    ) -> AsyncGenerator[Told, None]:
        """Runs the whole sequence as soon as the engines have room."""
        needs: list[Role] = ["decode", "prefill"] if request.wants_prefill else ["decode"]
        async with queue.waited(request.place, needs, request.span) as waited_s:
            self.waited(waited_s)
            async with aclosing(self._attempts(request)) as replies:
                async for reply in replies:
                    yield reply

    async def _attempts(self, request: RoutedRequest[Told]) -> AsyncGenerator[Told, None]:
        """Runs the whole sequence, again and again as long as a new attempt may help.

        If an engine cannot be reached, another engine takes its place. The same holds for the first
        engine that dies, even in the middle of its answer. If the KV of a prompt cannot be loaded,
        the prompt is computed again.

        Yields:
            Parts of the client's answer as they come.

        Raises:
            ApiError: the request is refused or failed, or no engine is left.
        """
        while not request.is_over:
            try:
                chosen = await request.choose()
                chosen.otherwise = self.turn_away
                with chosen as loan:
                    pair = await self.pair(request)
                    way = self.both(request, *pair, loan) if pair else self._in_turn(request, loan)
                    async with aclosing(way) as replies:
                        async for reply in replies:
                            yield reply
                return
            except StartAgainError:
                await request.begin_again(self.decode)

    async def pair(self, request: RoutedRequest[Told]) -> tuple[Engine, Engine] | None:
        """Picks the two engines for a request at the same time: the chosen engines if possible.
        Engines that are joined by a room always work at the same time.

        Returns:
            Prefill engine and decode engine. ``None`` if the engines should work in turn: they do
            not support this, are the same engine, or would gain nothing; or a role has no engine
            now.

        Raises:
            EngineRefusedError, NoEngineError: 503; no engine of a role is left.
            StartAgainError: other engines have come meanwhile.
        """
        may_have_room = self._may_have_room(request)
        if not (may_have_room or self._may_be_at_once(request)):
            return None
        source = self.prefill.first(request.tried, request.chosen[0])
        target = self.decode.first(request.tried, request.chosen[1])
        if may_have_room:
            target = target or await request.pick(self.decode)
            if target.needs_room or (source is not None and source.needs_room):
                return await self._pair_by_room(request, source, target)
        if source is None or target is None or not self._pays_at_once(request, source, target):
            return None
        pair = await self._pick_both(request, source, target)
        # If all engines were slow, the pick may have found another engine, just back in service,
        # which may not support this.
        return pair if pair == (source, target) else None

    def _may_have_room(self, request: RoutedRequest[Told]) -> bool:
        """Whether two engines that are joined by a room may serve the request."""
        may_be_joined = request.may_be_joined and (request.wants_prefill or request.is_list)
        return may_be_joined and (self.prefill.may_have_sglang or self.decode.may_have_sglang)

    async def _pair_by_room(
        self, request: RoutedRequest[Told], source: Engine | None, target: Engine
    ) -> tuple[Engine, Engine] | None:
        """Picks two engines of which at least one needs a room; see :meth:`pair`."""
        others = (each for each in self.decode.fit(request.tried) if not each.needs_room)
        if source is None and self.prefill.dispensable and any(others):
            return None
        source = source or await request.pick(self.prefill)
        pair = await self._pick_both(request, source, target)
        if not any(each.needs_room for each in pair):  # others, just back in service
            raise StartAgainError
        # Both SGLang servers give the prompts the rooms from the room of the request on.
        is_fit = not request.is_list or all(each.needs_room for each in pair)
        return pair if is_fit else None

    def _may_be_at_once(self, request: RoutedRequest[Told]) -> bool:
        return self.at_once != "never" and request.may_be_at_once

    def _pays_at_once(self, request: RoutedRequest[Told], source: Engine, target: Engine) -> bool:
        """Whether two engines without a room can work at the same time, and should."""
        can = source.told.at_once and source.told.control and target.told.at_once
        if not (can and self._may_be_at_once(request)) or source.url == target.url:
            return False
        return self.at_once == "always" or request.pays_at_once(source, target)

    async def _pick_both(
        self, request: RoutedRequest[Told], source: Engine, target: Engine
    ) -> tuple[Engine, Engine]:
        """Picks the two engines if possible, else others."""
        tried = request.tried
        return await self.prefill.pick(tried, source), await self.decode.pick(tried, target)

    async def _in_turn(
        self, request: RoutedRequest[Told], loan: Loan
    ) -> AsyncGenerator[Told, None]:
        """Runs the prefill engine first and the decode engine afterwards.

        Raises:
            StartAgainError: the lent KV is useless.
        """
        lent, computed = loan, await self._prefill(request, loan)
        if computed is not None:
            prefill, first = computed
            params, now = first.kv_transfer_params, time.monotonic()
            name, otherwise = request.engine_request_id, self.turn_away
            lent = Loan(prefill, params, name, computed_at=now, otherwise=otherwise)
        with lent:
            if computed is not None:
                for reply in request.take_first(first, prefill):
                    yield reply
                if request.is_over:
                    return
            async with aclosing(self._decode(request, lent)) as replies:
                async for reply in replies:
                    if request.has_fetched(reply):
                        lent.fetched()
                    yield reply

    async def _prefill(
        self, request: RoutedRequest[Told], loan: Loan
    ) -> tuple[Engine, Reply] | None:
        """Has a prefill engine compute the prompt: the chosen engine if possible.

        Returns:
            The prefill engine and its reply; ``None`` if the decode engine computes the prompt,
            and loads the KV of ``loan``.

        Raises:
            StartAgainError: the prefill engine could not load the KV lent to it.
        """
        if not request.wants_prefill:
            return None
        while True:
            try:
                engine = await request.pick(self.prefill, request.chosen[0])
            except (NoEngineError, EngineRefusedError):
                if not self.prefill.dispensable:
                    raise
                return None
            # The loan was made for the chosen engine. If the chosen engine is down, its substitute
            # computes the prompt without the loan.
            borrowed = loan if engine is request.chosen[0] else Loan()
            request.place.sent("prefill")
            try:
                with unless_read(engine, request.engine_request_id):
                    reply = await request.compute(engine, borrowed.params)
            except ApiError as error:
                if request.failed(engine, error, borrowed, may_skip=self.prefill.dispensable):
                    return None
            else:
                borrowed.fetched()
                loan.give_back()
                return engine, reply

    async def _decode(
        self, request: RoutedRequest[Told], lent: Loan, first: Engine | None = None
    ) -> AsyncGenerator[Told, None]:
        """Yields the replies of a decode engine: of ``first`` if possible.

        Raises:
            StartAgainError: the lent KV is useless, or the decode engine would have to request a
                ticket and does not support this.
        """
        while True:
            engine = await request.pick(self.decode, first or request.chosen[1])
            if request.joined is not None and engine is not first and not engine.told.at_once:
                raise StartAgainError
            request.place.sent("decode")
            began = False
            try:
                async with aclosing(request.draw(engine, lent.passed_on())) as replies:
                    async for reply in replies:
                        began = True
                        yield reply
                return
            except ApiError as error:
                request.failed(engine, error, None if began else lent)
                if began or request.is_lost(error, lent):
                    raise StartAgainError from error

    async def both(
        self, request: RoutedRequest[Told], prefill: Engine, decode: Engine, loan: Loan
    ) -> AsyncGenerator[Told, None]:
        """Has both engines work at the same time. The client gets the earlier beginning of the
        answer.

        Raises:
            StartAgainError: an engine failed, and no part of the answer is lost.
        """
        request.joined = joined = request.join(prefill, decode, self.key)
        borrowed = loan if prefill is request.chosen[0] else Loan()
        name, otherwise = request.engine_request_id, self.turn_away
        with Loan(prefill, joined.lent, name, otherwise=otherwise) as lent:
            request.computing = computing = asyncio.create_task(
                request.compute(prefill, borrowed.params)
            )
            replies = self._decode(request, lent, decode)
            asyncio.get_running_loop().call_soon(request.place.sent, "prefill")
            # Another task may go on with the replies: the router gives up only requests without any
            # reply (`Engine.give_up`).
            beginning = asyncio.create_task(_next(replies))
            has_begun = False
            try:
                await asyncio.wait((computing, beginning), return_when=asyncio.FIRST_COMPLETED)
                first: Sequence[Told] = ()
                is_over = False
                if beginning.done():
                    await beginning  # raises the error of the decode engine
                else:
                    try:
                        first = request.take_first(await computing, prefill)
                    except ApiError as error:
                        request.failed(prefill, error, lent)
                        raise StartAgainError from error
                    # Read here: a reply of the decode engine may end the answer from now on.
                    is_over = request.is_over
                borrowed.fetched()
                loan.give_back()
                for reply in first:
                    yield reply
                if is_over:
                    return
                told = await beginning
                while told is not None:
                    has_begun = True
                    lent.fetched()
                    yield told
                    told = await _next(replies)
            finally:
                if has_begun:
                    prefill.let_end(computing)
                else:
                    computing.cancel()
                    beginning.cancel()
                    await asyncio.gather(computing, beginning, return_exceptions=True)
                await replies.aclose()

    async def turn_away(self, params: Mapping[str, Any], request_id: str) -> None:
        """Gives KV back by way of a decode server: a vLLM server that does not know the model of a
        request has its connector release what the request was to load. Nothing is moved.
        """
        body = {"model": _NO_MODEL, "prompt": [0], "max_tokens": 1, "kv_transfer_params": params}
        fit = [] if TICKETS.isdisjoint(params) else self.decode.fit()
        servers = (each for each in fit if not (each.told.is_ours or each.needs_room))
        for engine in islice(servers, _MOST_ASKED):
            with suppress(ClientError, TimeoutError):
                async with asyncio.timeout(engine_client.CONNECT_TIMEOUT_S):
                    url, name = f"{engine.url}/v1/completions", f"{request_id}-back"
                    response = await engine.client.send(url, body, name, once=False)
                    response.close()
                    if response.status == 404:
                        return
        self.lapsed()


async def _next(replies: AsyncGenerator[Told, None]) -> Told | None:
    return await anext(replies, None)
