"""The corpus, the trained checkpoint against its task and against transformers, and the training script."""

import itertools
from random import Random

import pytest
import torch

from dcp_fix.engine.model import Model, PlainAttention
from dcp_fix.tiny import corpus, lessons, train


@pytest.fixture(scope="module")
def model():
    return Model.load(corpus.CHECKPOINT)


@torch.no_grad()
def answer_logits(model, prompt):
    """Logits at every position that predicts a token of the answer [A, vocabulary], by our model."""
    ids = torch.tensor(prompt.ids + prompt.answer[:-1])
    hidden = model.forward(ids, PlainAttention(model.config, len(ids)))
    return model.logits(hidden[-len(prompt.answer) :])


@pytest.mark.parametrize("name", corpus.CLASSES)
def test_prompts_have_their_length_and_ask_for_a_fact_that_they_hold(name):
    for prompt in corpus.prompts(name, 5):
        assert len(prompt.ids) == corpus.CLASSES[name][0]
        answer = corpus.decode(prompt.answer)
        assert answer.endswith(". <end>")
        assert prompt.text.count(answer.removesuffix(" <end>")) == 1
        assert prompt.text.endswith("? answer :")


def test_prompts_depend_on_class_seed_and_number_alone():
    assert corpus.prompts("512", 3) == corpus.prompts("512", 5)[:3]
    first = {tuple(corpus.prompts("512", 1, seed)[0].ids) for seed in range(4)}
    assert len(first) == 4
    with pytest.raises(ValueError, match="'513'.*512, 1536"):
        corpus.prompts("513", 1)


def facts_in(ids):
    """Every fact stated in a text."""
    words = [corpus.WORDS[i] for i in ids]
    length = len(corpus.FACT.split())
    for said in (words[i : i + length] for i in range(len(words) - length + 1)):
        fact = corpus.Fact(said[1], said[5], said[9], said[13])
        if said == fact.words() and fact.key in corpus.KEYS and fact.place in corpus.PLACES:
            yield fact


def test_training_never_shows_a_held_out_pair_and_prompts_ask_for_nothing_else():
    taught = itertools.islice(lessons.texts("0", "facts", 512, (2, 20)), 100)
    shown = [fact for ids, _ in taught for fact in facts_in(ids)]
    assert len(shown) > 300 and not any(fact.held_out for fact in shown)
    asked = [next(facts_in(prompt.answer)) for prompt in corpus.prompts("512", 20)]
    assert all(fact.held_out for fact in asked)


def test_held_out_is_what_the_checkpoint_that_ships_was_never_shown():
    """Another choice would ask it, as if it were new, for what it has learned."""
    pair = lambda key, place: corpus.Fact(corpus.KEYS[key], corpus.PLACES[place], "red", "hall")  # noqa: E731
    assert all(pair(key, place).held_out for key, place in ((0, 0), (3, 5), (5, 3), (1, 15)))
    assert not any(pair(key, place).held_out for key, place in ((0, 1), (3, 3), (7, 2), (4, 0)))


@pytest.mark.parametrize("stage", train.STAGES, ids=lambda s: f"{s.kind}-{max(s.lengths)}")
def test_training_texts_have_their_length_and_mark_targets(stage):
    for length in stage.lengths:
        for ids, weights in itertools.islice(lessons.texts("1", stage.kind, length, stage.facts), 30):
            assert len(ids) == len(weights) == length
            assert max(weights) >= 3.0 and ids[0] == corpus.BOS


@pytest.mark.parametrize("tokens", [0, 5, 6, 12, 13, 14, 100, 1001])
def test_filler_ends_where_it_is_told(tokens):
    lines = corpus.filler(Random(tokens), tokens)
    assert sum(map(len, lines)) == tokens and all(line[-1] == "." for line in lines)


def test_tokenizer_file_agrees_with_the_corpus():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(corpus.CHECKPOINT / "tokenizer.json"))
    prompt = corpus.prompts("512", 1)[0]
    assert tokenizer.encode(prompt.text).ids == prompt.ids
    assert tokenizer.decode(prompt.ids, skip_special_tokens=False) == prompt.text


def test_checkpoint_fits_a_repository():
    assert sum(f.stat().st_size for f in corpus.CHECKPOINT.iterdir()) <= 28e6


@pytest.mark.parametrize(("name", "count"), [("512", 8), ("1536", 2)])
def test_checkpoint_answers_held_out_questions(model, name, count):
    assert train.exact_match(model, name, count, seed=1, batch_tokens=2048) == 1


@torch.no_grad()
def test_checkpoint_equals_transformers_on_held_out_prompts(model):
    """Greedy tokens are equal, and logits differ by less than bf16 rounding (2**-8 of the largest)."""
    from transformers import GlmMoeDsaForCausalLM

    oracle = GlmMoeDsaForCausalLM.from_pretrained(corpus.CHECKPOINT, dtype=torch.float32).eval()
    for prompt in corpus.prompts("512", 2, seed=3) + corpus.prompts("1536", 1):
        ids = torch.tensor([prompt.ids + prompt.answer[:-1]])
        theirs = oracle(ids, use_cache=False, logits_to_keep=len(prompt.answer)).logits[0]
        ours = answer_logits(model, prompt)
        assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist() == prompt.answer
        assert (ours - theirs).abs().max() < 2**-8 * theirs.abs().max()


def test_greedy_choice_has_a_margin_that_rounding_cannot_cross(model):
    for prompt in corpus.prompts("512", 2):
        first, second = answer_logits(model, prompt).topk(2, -1).values.unbind(-1)
        assert (first - second).min() > 0.5


def small_trainer(monkeypatch):
    small = {"hidden_size": 32, "kv_lora_rank": 32, "q_lora_rank": 32, "num_attention_heads": 2, "v_head_dim": 16}
    small |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "qk_head_dim": 32, "num_key_value_heads": 2}
    small |= {"index_n_heads": 2, "index_head_dim": 32}
    monkeypatch.setattr(train, "GEOMETRY", train.GEOMETRY | small | {"index_topk": 24})
    return train.Trainer(0, "cpu", batch_tokens=576, rate=3e-3)


def test_training_lowers_both_losses_and_saves_a_checkpoint_that_loads(monkeypatch, tmp_path):
    trainer = small_trainer(monkeypatch)
    stage = train.Stage("facts", (96,), (2, 2), 40, 0.0, indexer=True, sparse=True)
    seen = list(trainer.run((stage,)))
    assert seen[-1].loss < 0.8 * seen[0].loss and seen[-1].indexer < seen[0].indexer
    trainer.save(tmp_path)
    loaded = Model.load(tmp_path)
    for name, value in trainer.weights.items():
        assert torch.equal(loaded.weights[name], value.detach().bfloat16().float()), name


def test_a_lesson_that_is_not_mastered_stops_training(monkeypatch):
    monkeypatch.setattr(train, "MOST_STEPS", 2)
    stage = train.Stage("facts", (96,), (2, 2), 2, 1.1)
    with pytest.raises(RuntimeError, match=r"lesson 1 \(facts\) stuck.*--seed"):
        list(small_trainer(monkeypatch).run((stage,)))
