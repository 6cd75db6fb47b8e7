"""Text that a model wrote, for its drafter's training and test: answers to prompts of four kinds.

A prompt is a template with a topic and details. Some templates and some topics are held out:
prompts of the test have a held-out template and a held-out topic, prompts of the training text have
neither. Summaries and edits are of passages: earlier answers of the model to free questions, whose
topics are held out likewise.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

KINDS = ("summarise", "edit", "code", "free")
TEST_TEMPERATURES = (0.0, 0.8)

_SEED = 5
_NUM_PASSAGES = 1024
_PASSAGE_CHARACTERS = 700
_NUM_TEMPLATES_HELD_OUT = 2  # the last ones of each kind
_TOPIC_HELD_OUT = 7  # each seventh

_TEMPLATES = {
    "summarise": [
        "Summarize the following text in {count} sentences.\n\n{passage}",
        "Summarise this for a {reader}:\n\n{passage}",
        "What is the main point of this text?\n\n{passage}",
        "{passage}\n\nList the {count} most important facts of the text above.",
        "Give a title and a summary of at most {count} sentences.\n\n{passage}",
        "Which conclusions can a {reader} draw from this text?\n\n{passage}",
        "Read the text and answer: what is it about, and why does it matter?\n\n{passage}",
        "Write an abstract of the text below.\n\nText: {passage}",
        "TL;DR of this text, please:\n\n{passage}",
        "Extract {count} key points from this passage as bullet points.\n\n{passage}",
    ],
    "edit": [
        "Rewrite this text in a {tone} tone. Keep its content.\n\n{passage}",
        "Correct the grammar and style of this text:\n\n{passage}",
        "Rewrite the text for a {reader}.\n\n{passage}",
        "Repeat the text below, but write every number as a word.\n\n{passage}",
        "Make this text shorter without losing information.\n\n{passage}",
        "Turn this text into a bulleted list.\n\n{passage}",
        "Rewrite the text in the past tense.\n\n{passage}",
        "Add a heading to each paragraph of this text:\n\n{passage}",
        "Copy this text and replace its first sentence with a better one.\n\n{passage}",
        "Proofread the passage and print the corrected version in a {tone} style.\n\n{passage}",
    ],
    "code": [
        "Write a {language} function that {task}.",
        "Write a {language} program that {task}. Explain it afterwards.",
        "How do I write {language} code that {task}?",
        "Show {language} code that {task}, with comments.",
        "Give me a {language} class with a method that {task}.",
        "Write a {language} function that {task}, and {count} tests for it.",
        "I am a {reader}. Explain, with {language} code, how a function {task}.",
        "Compare {count} ways to write {language} code that {task}.",
        "Complete the {language} script: it {task}. Include an example of its use.",
        "Implement, in idiomatic {language}, a helper that {task}; handle errors.",
    ],
    "free": [
        "What is {topic}?",
        "Explain {topic} to a {reader}.",
        "Write a short {form} about {topic}.",
        "What are the {count} most important facts about {topic}?",
        "Why does {topic} matter for {field}?",
        "How did {topic} change in the last century?",
        "Give {count} tips about {topic} for a {reader}.",
        "What are the advantages and disadvantages of {topic}?",
        "Write a {form} in which {topic} plays a role, in a {tone} tone.",
        "How is {topic} related to {field}?",
        "What are common misunderstandings about {topic}?",
        "Describe {topic} in {count} sentences.",
        "Write a dialogue of a {reader} and an expert on {topic}.",
        "Plan a lesson of one hour on {topic} for a {reader}.",
        "Tell me something surprising about {topic} and {field}.",
        "Compose a {tone} {form} that explains {topic} to a {reader}.",
    ],
}
_TOPICS = """
volcanoes, the moon, photosynthesis, chess, bread baking, the Roman Empire, electric cars, honey
bees, jazz music, inflation, vaccines, black holes, the French Revolution, gardening, coffee, sleep,
solar power, the human heart, whales, poetry, marathon running, the printing press, glaciers, tea
ceremonies, democracy, dinosaurs, earthquakes, folk tales, microscopes, bicycles, cheese, time
zones, ancient Egypt, recycling, meditation, the ocean floor, painting, railways, rainforests,
insurance, mountain climbing, the violin, penguins, weather forecasts, libraries, antibiotics,
deserts, public speaking, the stock market, bridges, origami, gravity, migration of birds, rice
farming, museums, the Silk Road, nutrition, satellites, wolves, negotiation, lighthouses, theatre,
friendship, coral reefs, algebra, the Industrial Revolution, photography, dental care, robots,
tropical storms, taxes, castles, swimming, fermentation, the periodic table, elections, wool, maps,
stress, the Renaissance, electric guitars, tides, budgeting, spiders, nuclear energy, opera, sugar,
the Olympic Games, dogs, translation, paper, plate tectonics, teamwork, the Vikings, clouds, yoga,
the water cycle, copyright, owls, cinema, steel, camping, ancient Greece, memory, chocolate, soil,
trade unions, the solar system, bread molds, ballet, salt, first aid, airports, ants, genetics,
pottery, the nervous system, urban planning, comets, cooking pasta, philosophy, football, wind
turbines, the Great Wall, kindness, hospitals, mushrooms, the alphabet, job interviews, rivers
"""
_TASKS = """
reverses a string; sorts a list of numbers; counts the words of a text; finds prime numbers;
reads a CSV file; computes factorials; merges two sorted lists; checks for palindromes; prints a
multiplication table; finds duplicates in a list; converts Celsius to Fahrenheit; implements a
stack; implements a queue; searches a sorted array; computes Fibonacci numbers; parses a date;
validates an email address; generates random passwords; finds the largest item of a list; flattens
a nested list; counts vowels; computes the average of numbers; removes spaces from a text; rotates
an array; checks whether a year is a leap year; converts numbers to Roman numerals; sums the digits
of a number; finds the longest word; computes the greatest common divisor; inverts a dictionary;
transposes a matrix; multiplies two matrices; writes a log file; downloads a web page; caches
results; counts lines of a file; encodes a text with a Caesar cipher; implements a linked list;
traverses a binary tree; computes the median; groups records by a key; formats a price; plays rock,
paper, scissors; simulates dice; shuffles cards; splits a bill; converts binary to decimal; stores
settings in JSON; retries a failed call; measures the time of a call; finds the shortest path in a
graph; draws a triangle of stars; computes compound interest; compares two versions; finds anagrams
"""
_DETAILS = {
    "count": ["two", "three", "four", "five"],
    "reader": ["child", "beginner", "student", "teacher", "nurse", "farmer", "manager", "tourist"],
    "tone": ["formal", "friendly", "funny", "serious", "poetic", "plain"],
    "form": ["story", "poem", "letter", "essay", "speech", "article", "diary entry"],
    "field": ["science", "history", "art", "daily life", "the economy", "health", "education"],
    "language": ["Python", "Python", "Python", "JavaScript", "Java", "C++", "Go", "SQL"],
}


def _listed(text: str, separator: str) -> list[str]:
    return [" ".join(item.split()) for item in text.split(separator)]


def _part(items: list[str], is_held_out: bool) -> list[str]:
    return [item for i, item in enumerate(items) if (i % _TOPIC_HELD_OUT == 0) == is_held_out]


def templates(kind: str, is_held_out: bool) -> list[str]:
    """The templates of a kind for the test, or for the training text."""
    cut = len(_TEMPLATES[kind]) - _NUM_TEMPLATES_HELD_OUT
    return _TEMPLATES[kind][cut:] if is_held_out else _TEMPLATES[kind][:cut]


def topics(kind: str, is_held_out: bool) -> list[str]:
    """The topics (tasks, for code) of the test, or of the training text."""
    items = _listed(_TASKS, ";") if kind == "code" else _listed(_TOPICS, ",")
    return _part(items, is_held_out)


class Prompts:
    """Draws prompts.

    Attributes:
        passages: texts for summaries and edits, by ``is_held_out``: add answers to free questions.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.passages: dict[bool, list[str]] = {False: [], True: []}

    def draw(self, kind: str, is_held_out: bool) -> str:
        """One prompt. Without passages, a summary or an edit is of the topic's name.

        Args:
            kind: one of :data:`KINDS`.
            is_held_out: whether it is for the test.
        """
        choose = self._rng.choice
        topic = choose(topics(kind, is_held_out))
        passage = choose(self.passages[is_held_out] or [topic])
        details = {name: choose(values) for name, values in _DETAILS.items()}
        return choose(templates(kind, is_held_out)).format(
            topic=topic, task=topic, passage=passage[:_PASSAGE_CHARACTERS].strip(), **details
        )


@dataclass(frozen=True)
class Answer:
    """A prompt and its answer.

    Attributes:
        kind: one of :data:`KINDS`.
        temperature: of the sampled tokens.
        token_ids: of the prompt and of the answer.
    """

    kind: str
    temperature: float
    num_prompt_tokens: int
    token_ids: list[int]


@dataclass(frozen=True)
class Text:
    training: list[Answer]
    test: list[Answer]

    @property
    def num_tokens(self) -> int:
        """Tokens of the training answers, without their prompts."""
        return sum(len(a.token_ids) - a.num_prompt_tokens for a in self.training)


def write_text(
    llm: Any, seconds: float, num_per_round: int, num_test_per_kind: int, max_tokens: int
) -> Text:
    """Answers of the model. The test is written whole; training rounds until the time is over.

    Args:
        llm: a :class:`pagespec.LLM`, with or without a chat template.
        seconds: for all; a round that would exceed them by the last round's time is not begun.
        num_per_round: prompts per round.
        max_tokens: of an answer.
    """
    from pagespec import SamplingParams

    begin, rng, prompts = time.perf_counter(), random.Random(_SEED), Prompts(_SEED)
    has_chat = bool(getattr(llm.tokenizer, "chat_template", None))

    def answer(kinds: Sequence[str], texts: list[str], temperatures: list[float]) -> list[Answer]:
        params = [
            SamplingParams(
                temperature=t, max_tokens=max_tokens, seed=rng.getrandbits(31), detokenize=False
            )
            for t in temperatures
        ]
        if has_chat:
            messages = [[{"role": "user", "content": text}] for text in texts]
            outputs = llm.chat(messages, params, use_tqdm=False)
        else:
            outputs = llm.generate(texts, params, use_tqdm=False)
        return [
            Answer(kind, t, len(prompt), [*prompt, *output.outputs[0].token_ids])
            for kind, t, output in zip(kinds, temperatures, outputs, strict=True)
            for prompt in [list(output.prompt_token_ids)]
        ]

    def draw(kinds: Sequence[str], is_held_out: bool) -> list[str]:
        return [prompts.draw(kind, is_held_out) for kind in kinds]

    def keep_passages(answers: list[Answer], is_held_out: bool) -> None:
        prompts.passages[is_held_out] += [
            llm.tokenizer.decode(a.token_ids[a.num_prompt_tokens :], skip_special_tokens=True)
            for a in answers
        ]

    free = ["free"] * min(_NUM_PASSAGES, num_per_round)
    training = answer(free, draw(free, False), [round(rng.random(), 2) for _ in free])
    keep_passages(training, False)
    free = ["free"] * num_test_per_kind
    keep_passages(answer(free, draw(free, True), [0.8] * len(free)), True)
    kinds = list(KINDS) * num_test_per_kind
    texts, test = draw(kinds, True), []
    for temperature in TEST_TEMPERATURES:
        test += answer(kinds, texts, [temperature] * len(kinds))
    last_s = 0.0
    while time.perf_counter() - begin + last_s < seconds:
        round_begin = time.perf_counter()
        kinds = [KINDS[i % len(KINDS)] for i in range(num_per_round)]
        training += answer(kinds, draw(kinds, False), [round(rng.random(), 2) for _ in kinds])
        last_s = time.perf_counter() - round_begin
    return Text(training, test)
