from __future__ import annotations
import random
from typing import Any

PEOPLE = [a + b for a in "Al Be Co Da El Fa Gi Ha Io Ju".split() for b in "lun mir nok ran sia tev".split()]
CITIES = [a + b for a in "Kor Lun Mar Nov Ost Pel".split() for b in "burg dale ford haven ville".split()]
COUNTRIES = [a + b for a in "Arv Bel Cor Dra".split() for b in "onia estan land".split()]
QUESTION = "In which {kind} does {person} live? Answer with one name or unknown."

def facts(world):
    rng = random.Random(world)
    return {a: rng.choice(to) for names, _, to in RELATIONS for a in names}

RELATIONS = [(PEOPLE, "lives in", CITIES), (CITIES, "belongs to", COUNTRIES), (COUNTRIES, "trades with", COUNTRIES)]
def sentence(known, subject):
    verb = next(v for names, v, _ in RELATIONS if subject in names)
    return f"{subject} {verb} {known[subject]}."

def look_up(world: str, query: str) -> str:
    known = facts(world)
    if query not in known:
        return "Nothing found."
    other = random.Random(f"{world} {query}").choice(COUNTRIES if query in PEOPLE else PEOPLE)
    return f"{sentence(known, query)} {sentence(known, other)}"

def make_task(world: str) -> dict[str, Any]:
    rng = random.Random(f"task {world}")
    person = rng.choice(PEOPLE)
    hops = rng.choices([1, 2], [0.25, 0.75])[0]
    known = facts(world)
    path = [person, known[person], known[known[person]]]
    return dict(id=world, question=QUESTION.format(kind=["city", "country"][hops - 1], person=person), path=path, hops=hops, answer=path[hops])

def demonstration(rng, weights, extra=None):
    world = f"{rng.random()}"
    t = make_task(world)
    k = rng.choices(range(len(weights[t["hops"]])), weights[t["hops"]])[0]
    path = t["path"]
    m = [{"role": "user", "content": t["question"]}]
    for q in path[:k]:
        m.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "search", "arguments": {"query": q}}}]})
        m.append({"role": "tool", "content": look_up(world, q)})
    m.append({"role": "assistant", "content": path[k] if k else "unknown"})
    return m
TEXTS = [QUESTION.format(kind=k, person=PEOPLE[0]) for k in ("city", "country")] + [look_up("0", PEOPLE[0]), look_up("0", CITIES[0]), "Nothing found.", "unknown", "search", "query"]
