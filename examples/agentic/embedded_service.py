"""A service that answers its users with the model being trained, and learns from their ratings.

    python examples/agentic/embedded_service.py model.path=FOLDER

    POST /ask   {"question": "..."}            -> {"drafts": [{"id": "...", "text": "..."}, ...]}
    POST /rate  {"id": "...", "rating": 0.7}   -> 204

Each question is a task, each draft an episode of its group, and the user's rating its reward, which the agent awaits.
The Controller runs in this program's event loop, beside the web server. At most (staleness.max + 1) x
train.batch_groups questions are open at a time; a question that is not rated within episode.timeout_s is dropped.
"""

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

from areal import Config, Controller, Episode, EpisodeError, Message, Task, launch

DEFAULTS = {
    "name": "service",
    "group.size": 2,  # two drafts per question: GRPO learns from their difference
    "group.min_members": 2,
    "train.batch_groups": 4,
    "train.minibatches": 1,
    "train.steps": 1_000_000,  # practically unlimited
    "staleness.max": 8,
    "episode.timeout_s": 300,  # a user has five minutes to rate; after that the question is dropped, not scored
    "episode.retries": 0,  # an unrated draft is not written again
    "failures.infrastructure": 1_000_000,  # unrated drafts time out, which must not end the service
    "watchdog_s": 7 * 86400,  # stop only after a week without progress
    "view": "plain",
}


class Service:
    def __init__(self, config: Config) -> None:
        self.drafts = config.group.size
        self.questions: asyncio.Queue[Task] = asyncio.Queue(maxsize=64)
        self.answers: dict[str, asyncio.Queue[dict[str, str]]] = {}
        self.ratings: dict[str, asyncio.Future[float]] = {}
        self.asked = 0

    async def tasks(self) -> AsyncIterator[Task]:
        """The live data set: an endless stream of questions."""
        while True:
            yield await self.questions.get()

    async def agent(self, episode: Episode, task: Task) -> float:
        try:
            reply = await episode.chat([{"role": "user", "content": task["question"]}])
        except EpisodeError as error:
            if task["id"] in self.answers:
                self.answers[task["id"]].put_nowait({"error": str(error)})
            raise
        if task["id"] not in self.answers:
            raise EpisodeError("the user has gone")
        draft = f"{task['id']}.{episode.member}"
        rating = self.ratings[draft] = asyncio.get_running_loop().create_future()
        try:
            self.answers[task["id"]].put_nowait({"id": draft, "text": reply["content"]})
            return await rating
        finally:
            del self.ratings[draft]

    async def ask(self, request: web.Request) -> web.Response:
        question = (await _json(request)).get("question")
        if not isinstance(question, str):
            raise web.HTTPBadRequest(text='expected {"question": "some text"}')
        self.asked += 1
        task = {"id": f"question-{self.asked}", "question": question}
        answers = self.answers[task["id"]] = asyncio.Queue()
        try:
            self.questions.put_nowait(task)
            async with asyncio.timeout(60):
                drafts = [await answers.get() for _ in range(self.drafts)]
            if errors := [draft["error"] for draft in drafts if "error" in draft]:
                raise web.HTTPUnprocessableEntity(text=errors[0])
            return web.json_response({"drafts": drafts})
        except asyncio.QueueFull:
            raise web.HTTPServiceUnavailable(text="too many unrated questions; try again later") from None
        except TimeoutError:
            raise web.HTTPGatewayTimeout(text="the model did not answer within 60 s") from None
        finally:
            del self.answers[task["id"]]

    async def rate(self, request: web.Request) -> web.Response:
        body = await _json(request)
        rating, draft = body.get("rating"), self.ratings.get(str(body.get("id")))
        if not isinstance(rating, int | float) or not 0 <= rating <= 1:
            raise web.HTTPBadRequest(text=f"rating={rating!r}: expected a number from 0 to 1")
        if draft is None or draft.done():
            raise web.HTTPNotFound(text=f"no draft {body.get('id')!r} is waiting for a rating")
        draft.set_result(float(rating))
        return web.Response(status=204)

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.post("/ask", self.ask), web.post("/rate", self.rate)])
        return app


async def _json(request: web.Request) -> Message:
    try:
        body = await request.json()
    except ValueError:
        raise web.HTTPBadRequest(text="the body is not JSON") from None
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="the body is not a JSON object")
    return body


async def serve(config: Config, port: int = 8080) -> None:
    service = Service(config)
    runner = web.AppRunner(service.app(), shutdown_timeout=1.0)
    async with Controller(config) as controller:
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            print(f"answering on http://127.0.0.1:{port}")
            await controller.train(service.agent, service.tasks())
        finally:
            await runner.cleanup()


if __name__ == "__main__":
    launch(serve, DEFAULTS)
