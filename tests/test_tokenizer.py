"""Tokenizers: ids held to llama.cpp's, decoding to the bytes, chats to transformers', and vocabularies compared."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer as Backend, pre_tokenizers, processors

import tiny
from draftwise.checkpoint import open_checkpoint
from draftwise.checkpoint.gguf_file import read_gguf
from draftwise.tokenizer import Tokenizer, load_tokenizer
from draftwise.tokenizer.gguf import PRE_TOKENIZERS, gguf_backend

# digits, code, accents (composed and not), scripts, emoji, odd white space, contractions, special tokens, long runs
STRESS = (
    "Hello world! It's 3.14159, 1,234,567 or 0x1F; I'll pay $12,345.67 (50%)...\n"
    "def f(x):\n    return {'a': x[0], \"b\": x ** 2}  # comment\n\tif x != None:\r\n\t\tpass\n\n\n"
    "éàüñß Straße naïve Ångström cafe\u0301 ﬁne ＡＢＣ１２３ ½ ² Ⅷ ١٢٣\n"
    "你好，世界！今天是2024年。こんにちは、世界。カタカナ 안녕하세요 Привет мир, ΑΒΓ ελληνικά עברית العربية हिन्दी ไทย\n"
    "🦙🚀 👩‍👩‍👧 🇩🇪 👍🏽 ❤️\u200b\ufeff\u00a0x\u2003y\u3000z   \t  end   \n  \n   "
    "WE'RE You'Ve don’t CAN'T 'tis O'Neil's http://example.com/a?b=c&d=%20 snake_case camelCase HTTPServer2Go\n"
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|> <|im_end|><|not_special|> <repo_name> <s> </t> <0x0A> [INST]\n"
    + "a" * 50
    + " " * 37
    + "=" * 80
    + "\n" * 9
    + "ha" * 40
    + "0" * 31
    + "\x00\x07\x7f\u0085\u2028|\\^~`"
)

# by llama.cpp's tokenizer: special=True and special=False, without BOS
SMOLLM2 = """
19556 905 17 657 506 216 35 30 33 36 33 37 41 28 216 33 28 34 35 36 28 37 38 39 355 216 32 104 33 54 43 339 3060
2290 1885 33 34 28 35 36 37 30 38 39 365 37 32 18554 950 198 1604 275 24 104 727 472 1003 7353 81 1539 1792 75 32
1750 476 82 1799 1792 1903 216 34 109 216 907 5189 198 197 342 1792 6541 1943 42 15290 197 5467 1116 198 2756 16739
7170 10214 34878 19144 34878 85 15486 46494 5549 223 863 1321 45682 1020 4565 151 219 40367 662 216 8083 111 8083
112 8083 113 8083 235 8083 236 8083 237 216 16738 216 19133 216 173 223 117 216 164 111 164 112 164 113 198 18645
250 48392 138 12831 7906 240 178 239 230 8083 219 15076 228 18614 119 27830 34 32 34 36 32090 129 19076 7365 237
10391 237 41152 7365 111 7365 124 29917 7906 240 178 239 230 19076 10391 121 10391 140 10391 121 11100 228 18601 239
226 182 223 239 33085 242 183 222 133 183 244 238 5470 249 46879 16464 32547 41337 7872 9175 28 5664 235 153 236 153
237 32524 17162 17162 25723 11517 12001 21118 26112 12960 112 37657 30825 28532 120 27819 34966 20602 31462 23339
43463 12335 134 27011 30658 16525 44757 37189 216 31933 222 10283 241 10283 112 198 10813 116 243 10813 244 218
15107 235 119 321 231 10813 235 119 321 231 10813 235 117 15107 225 119 10813 225 120 15107 235 231 10813 233 138
4636 247 114 31752 321 229 186 136 140 15442 104 321 221 105 12109 218 106 333 197 216 1112 333 11181 11181 26587 23
3256 1206 23 25917 1326 417 100 27190 23 68 637 34818 492 23 47917 506 3622 1742 7434 30 824 31 81 47 82 45 83 22 84
23446 34 32 14321 79 7544 32782 10802 43335 10740 34 6044 198 1 4093 198 26843 2 198 0 216 2 44 108 1766 79 19159
108 46 216 3 2067 99 46 22577 100 46 2067 32 104 32 49 46 933 39637 77 198 46880 46880 46880 46880 46880 46880 46880
46880 46880 46880 46880 46880 11510 12427 289 40672 31156 28733 22342 22342 198 39573 1287 1287 1287 1287 1287 1287
1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287
1287 1287 1287 1287 1287 1287 1287 1287 19754 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32
32 32 32 32 32 32 32 32 190 195 217 141 223 321 118 43509 78 110 80
"""
SMOLLM2_AS_TEXT = """
19556 905 17 657 506 216 35 30 33 36 33 37 41 28 216 33 28 34 35 36 28 37 38 39 355 216 32 104 33 54 43 339 3060
2290 1885 33 34 28 35 36 37 30 38 39 365 37 32 18554 950 198 1604 275 24 104 727 472 1003 7353 81 1539 1792 75 32
1750 476 82 1799 1792 1903 216 34 109 216 907 5189 198 197 342 1792 6541 1943 42 15290 197 5467 1116 198 2756 16739
7170 10214 34878 19144 34878 85 15486 46494 5549 223 863 1321 45682 1020 4565 151 219 40367 662 216 8083 111 8083
112 8083 113 8083 235 8083 236 8083 237 216 16738 216 19133 216 173 223 117 216 164 111 164 112 164 113 198 18645
250 48392 138 12831 7906 240 178 239 230 8083 219 15076 228 18614 119 27830 34 32 34 36 32090 129 19076 7365 237
10391 237 41152 7365 111 7365 124 29917 7906 240 178 239 230 19076 10391 121 10391 140 10391 121 11100 228 18601 239
226 182 223 239 33085 242 183 222 133 183 244 238 5470 249 46879 16464 32547 41337 7872 9175 28 5664 235 153 236 153
237 32524 17162 17162 25723 11517 12001 21118 26112 12960 112 37657 30825 28532 120 27819 34966 20602 31462 23339
43463 12335 134 27011 30658 16525 44757 37189 216 31933 222 10283 241 10283 112 198 10813 116 243 10813 244 218
15107 235 119 321 231 10813 235 119 321 231 10813 235 117 15107 225 119 10813 225 120 15107 235 231 10813 233 138
4636 247 114 31752 321 229 186 136 140 15442 104 321 221 105 12109 218 106 333 197 216 1112 333 11181 11181 26587 23
3256 1206 23 25917 1326 417 100 27190 23 68 637 34818 492 23 47917 506 3622 1742 7434 30 824 31 81 47 82 45 83 22 84
23446 34 32 14321 79 7544 32782 10802 43335 10740 34 6044 198 44 108 306 79 3738 108 46 4093 198 26843 44 108 306 79
486 108 46 198 44 108 486 1714 2692 108 46 2067 108 306 79 486 108 21198 108 1766 79 19159 108 46 2067 22139 79 1245
46 2067 99 46 22577 100 46 2067 32 104 32 49 46 933 39637 77 198 46880 46880 46880 46880 46880 46880 46880 46880
46880 46880 46880 46880 11510 12427 289 40672 31156 28733 22342 22342 198 39573 1287 1287 1287 1287 1287 1287 1287
1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287 1287
1287 1287 1287 1287 1287 1287 1287 19754 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32 32
32 32 32 32 32 32 190 195 217 141 223 321 118 43509 78 110 80
"""
QWEN = """
9707 1879 0 1084 594 220 18 13 16 19 16 20 24 11 220 16 11 17 18 19 11 20 21 22 476 220 15 87 16 37 26 358 3278 2291
400 16 17 11 18 19 20 13 21 22 320 20 15 11334 9338 750 282 2075 982 262 470 5360 64 1210 856 58 15 1125 330 65 788
856 3070 220 17 92 220 671 3980 198 743 856 961 2240 2834 197 41431 1406 963 6362 2391 5653 7997 26647 23455 94880
586 79252 968 495 85584 40930 53839 32495 70731 811 62823 94 139173 134557 20109 24918 33517 220 26062 220 29456 220
70467 100 220 149 94 149 95 149 96 198 108386 3837 99489 6313 100644 20412 17 15 17 19 7948 1773 89015 5373 99489
1773 70393 46207 70393 95352 95170 144370 91145 79484 26991 8178 137144 11 7851 239 144946 145281 59147 33486 33486
41424 33269 29762 67337 74134 131917 123826 129071 84310 42311 101 30484 99 43647 220 125451 198 149955 145836 61804
102 378 235 145233 378 235 145665 11162 229 102 145336 61804 235 145375 70470 30543 15692 3225 4102 87 378 225 88
22441 89 262 3677 835 5872 2303 256 19677 94153 1446 6 42612 1513 1405 19508 17323 364 83 285 506 6 61940 594 1758
1110 8687 905 14186 30 65 19535 5 67 7846 17 15 25265 19096 49152 4207 10130 5475 17 10850 198 151644 872 198 13048
151645 198 151643 220 151645 27 91 1921 41629 91 29 366 23476 1269 29 366 82 29 690 83 29 366 15 87 15 32 29 508
64462 921 69440 69440 69440 69440 69440 69440 5305 10589 16168 44908 54060 71 1466 1466 1466 1466 1466 1466 1466
1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466
1466 1466 1466 1466 1466 1466 1466 73535 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15
15 15 15 15 15 15 188 195 221 126 227 378 101 22957 61 93 63
"""
QWEN_AS_TEXT = """
9707 1879 0 1084 594 220 18 13 16 19 16 20 24 11 220 16 11 17 18 19 11 20 21 22 476 220 15 87 16 37 26 358 3278 2291
400 16 17 11 18 19 20 13 21 22 320 20 15 11334 9338 750 282 2075 982 262 470 5360 64 1210 856 58 15 1125 330 65 788
856 3070 220 17 92 220 671 3980 198 743 856 961 2240 2834 197 41431 1406 963 6362 2391 5653 7997 26647 23455 94880
586 79252 968 495 85584 40930 53839 32495 70731 811 62823 94 139173 134557 20109 24918 33517 220 26062 220 29456 220
70467 100 220 149 94 149 95 149 96 198 108386 3837 99489 6313 100644 20412 17 15 17 19 7948 1773 89015 5373 99489
1773 70393 46207 70393 95352 95170 144370 91145 79484 26991 8178 137144 11 7851 239 144946 145281 59147 33486 33486
41424 33269 29762 67337 74134 131917 123826 129071 84310 42311 101 30484 99 43647 220 125451 198 149955 145836 61804
102 378 235 145233 378 235 145665 11162 229 102 145336 61804 235 145375 70470 30543 15692 3225 4102 87 378 225 88
22441 89 262 3677 835 5872 2303 256 19677 94153 1446 6 42612 1513 1405 19508 17323 364 83 285 506 6 61940 594 1758
1110 8687 905 14186 30 65 19535 5 67 7846 17 15 25265 19096 49152 4207 10130 5475 17 10850 198 27 91 318 4906 91 29
872 198 13048 27 91 318 6213 91 397 27 91 8691 723 427 91 29 82639 318 6213 91 1784 91 1921 41629 91 29 366 23476
1269 29 366 82 29 690 83 29 366 15 87 15 32 29 508 64462 921 69440 69440 69440 69440 69440 69440 5305 10589 16168
44908 54060 71 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466
1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 1466 73535 15 15 15 15 15 15 15 15
15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 15 188 195 221 126 227 378 101 22957 61 93 63
"""


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split()]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2_path))


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def byte_level(tiny_folder: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(tiny_folder))


# encoding


def test_ids_of_the_real_model_are_those_of_llama_cpp(smollm2: Tokenizer) -> None:
    assert smollm2.encode(STRESS) == numbers(SMOLLM2)
    assert smollm2.encode(STRESS, special=False) == numbers(SMOLLM2_AS_TEXT)
    assert smollm2.decode(numbers(SMOLLM2_AS_TEXT)) == STRESS


@pytest.mark.lab
@pytest.mark.parametrize("model", ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"])
def test_ids_of_large_models_are_those_of_llama_cpp(model: str, lab_model: Callable[[str], Path]) -> None:
    tokenizer = load_tokenizer(open_checkpoint(lab_model(model)))
    assert tokenizer.encode(STRESS) == numbers(QWEN)
    assert tokenizer.encode(STRESS, special=False) == numbers(QWEN_AS_TEXT)
    assert tokenizer.decode(numbers(QWEN_AS_TEXT)) == STRESS
    assert tokenizer.size == 151665  # of 151936 rows
    assert tokenizer.eos_tokens == {151643, 151645}
    assert tokenizer.encode("</s>") == [522, 82, 29]  # an ordinary word here, for which llama.cpp makes an exception


# the words of llama.cpp, except that combining marks stay with their letters where the models' own expressions say so
WORDS_OF = "I'LL pay $1234.5 for x2's naïveté,\n\n  HTTPa你好こん १२ मी!  \t z\r\n"
WORDS = {
    "default": "I|'|LL| pay| |$|123|4|.|5| for| x|2|'|s| naïveté|,|\n\n | HTTPa你好こん| |१२| म|ी|!|  \t| z|\r\n",
    "gpt-2": "I|'|LL| pay| $|1234|.|5| for| x|2|'s| naïveté|,|\n\n | HTTPa你好こん| १२| म|ी!|  \t| z|\r\n",
    "smollm": "I|'|LL| pay| $|1|2|3|4|.|5| for| x|2|'s| naïveté|,|\n\n | HTTPa你好こん| |१|२| म|ी!|  \t| z|\r\n",
    "llama-bpe": "I|'LL| pay| $|123|4|.|5| for| x|2|'s| naïveté|,\n\n| | HTTPa你好こん| |१२| म|ी!|  \t| z|\r\n",
    "qwen2": "I|'LL| pay| $|1|2|3|4|.|5| for| x|2|'s| naïveté|,\n\n| | HTTPa你好こん| |१|२| म|ी!|  \t| z|\r\n",
    "qwen35": "I|'LL| pay| $|1|2|3|4|.|5| for| x|2|'s| naïveté|,\n\n| | HTTPa你好こん| |१|२| मी|!|  \t| z|\r\n",
    "deepseek-llm": "I|'|LL| pay| $|1234|.|5| for| x|2|'|s| na|ï|vet|é|,|\n|\n| | HTTPa|你好こん| |१२| |मी|!|  \t| z|\r|\n",
    "deepseek-coder": "I|'|LL| pay| $|1|2|3|4|.|5| for| x|2|'|s| naïveté|,|\n|\n| | HTTPa|你好こん| |१|२| |म|ी|!|  \t| z|\r|\n",
    "deepseek-v3": "I|'LL| pay| $|123|4|.|5| for| x|2|'s| naïveté|,\n\n| | HTTPa|你好こん| |१२| मी|!|  \t| z|\r\n",
    "falcon": "I|'|LL| pay| |$|123|4|.|5| for| x|2|'|s| naïveté|,|\n\n | HTTPa你好こん| १२| म|ी|!|  \t| z|\r\n",
    "tekken": "I|'LL| pay| $|1|2|3|4|.|5| for| x|2|'s| naïveté|,\n\n| | HTTPa你好こん| |१|२| मी|!|  \t| z|\r\n",
    "gpt-4o": "I'LL| pay| $|123|4|.|5| for| x|2|'s| naïveté|,\n\n| | HTTPa你好こん| |१२| मी|!|  \t| z|\r\n",
}


@pytest.mark.parametrize("pre", WORDS)
def test_pre_tokenizers_cut_texts_into_their_words(pre: str) -> None:
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in PRE_TOKENIZERS[pre].expressions]
    words = pre_tokenizers.Sequence(splits).pre_tokenize_str(WORDS_OF)
    assert "|".join(word for word, _ in words) == WORDS[pre]


def test_every_pre_tokenizer_builds() -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.merges": ["a b"]}
    for pre in PRE_TOKENIZERS:
        backend = gguf_backend(metadata | {"tokenizer.ggml.pre": pre}, "x.gguf")
        assert backend.encode("ab").ids == [2], pre


# A SentencePiece vocabulary small enough to read. Single characters have the lowest scores.
PIECES = (
    "▁|e|t|a|o|n|h|s|r|l|d|w|▁t|he|▁a|in|▁the|or|ll|▁w|er|▁wor|▁world|▁he|▁hell|▁hello|▁▁|▁▁▁▁|aa|aaa|é|i|\n|ld|ello|▁s"
).split("|")
SENTENCEPIECE: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *PIECES,
        "<|user|>",
        "<tool>",
    ],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [3, 4],
    "tokenizer.ggml.scores": [0.0] * 259 + [-1000.0 * (len(piece) == 1) - i for i, piece in enumerate(PIECES)] + [0.0, 0.0],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}
SENTENCE = "hello world\n<|user|>the  aaaa aaaaa é 🦙 wor<tool>ld </s>   hell x"


def sentencepiece(folder: Path, **metadata: Any) -> Tokenizer:
    from gguf import GGUFWriter

    writer = GGUFWriter(folder / "spm.gguf", "llama")
    for key, value in (SENTENCEPIECE | {key.replace("__", "."): value for key, value in metadata.items()}).items():
        if value is not None:
            put = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
            put.get(type(value), writer.add_array)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Tokenizer(gguf_backend(read_gguf(folder / "spm.gguf").metadata, "spm.gguf"), names={"bos_token": "<s>"})


@pytest.mark.parametrize(
    ("prefix", "special", "expected"),
    [
        (
            True,
            True,
            "1 284 281 291 295 275 259 273 288 273 287 287 259 289 259 243 162 169 156 280 296 259 292 259 2 285 "
            "259 283 259 123",
        ),
        (
            True,
            False,
            "1 284 281 291 63 127 120 266 279 127 65 261 272 259 273 288 273 287 287 259 289 259 243 162 169 156 "
            "280 296 259 292 259 63 50 266 65 285 283 259 123",
        ),
        (
            False,
            True,
            "1 272 277 263 281 291 295 261 272 259 273 288 273 287 287 259 289 259 243 162 169 156 280 296 292 "
            "259 2 285 283 259 123",
        ),
        (
            False,
            False,
            "1 272 277 263 281 291 63 127 120 266 279 127 65 261 272 259 273 288 273 287 287 259 289 259 243 162 "
            "169 156 280 296 292 259 63 50 266 65 285 283 259 123",
        ),
    ],
)
def test_sentencepiece_ids_are_those_of_llama_cpp(prefix: bool, special: bool, expected: str, tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, tokenizer__ggml__add_space_prefix=prefix)
    assert tokenizer.encode(SENTENCE, special=special) == numbers(expected)


def test_ids_of_a_folder_are_those_of_transformers(tiny_folder: Path, byte_level: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny_folder)
    assert byte_level.encode(STRESS) == theirs(STRESS)["input_ids"]
    assert byte_level.decode(byte_level.encode(STRESS)) == theirs.decode(theirs(STRESS)["input_ids"], skip_special_tokens=True)
    assert byte_level.size == len(theirs) == 300


def test_special_tokens_in_a_text_can_be_text(byte_level: Tokenizer) -> None:
    assert byte_level.encode("<|im_end|>") == [2]
    as_text = byte_level.encode("<|im_end|>", special=False)
    assert 2 not in as_text and byte_level.decode(as_text) == "<|im_end|>"
    assert byte_level.encode("<|im_end|>") == [2]


def test_bos_is_put_where_the_models_own_tokenizer_puts_it(smollm2: Tokenizer, tmp_path: Path, tiny_folder: Path) -> None:
    assert smollm2.encode("hi") == smollm2.encode("hi", around=False) == [6004]
    assert smollm2.bos_token == 1
    spm = sentencepiece(tmp_path)
    assert spm.encode("hello") == [1, 284] and spm.encode("hello", around=False) == [284]
    silent = sentencepiece(tmp_path, tokenizer__ggml__bos_token_id=None, tokenizer__ggml__unknown_token_id=None)
    assert silent.encode("hello") == [1, 284]
    both = sentencepiece(tmp_path, tokenizer__ggml__add_bos_token=False, tokenizer__ggml__add_eos_token=True)
    assert both.encode("hello") == [284, 2]
    llama3 = load_tokenizer(open_checkpoint(tiny.tiny_gguf(tmp_path / "3.gguf", tiny_folder, tokenizer__ggml__pre="llama-bpe")))
    assert llama3.encode("hi")[0] == 0 and llama3.encode("hi", around=False)[0] != 0


@pytest.mark.parametrize("flag", [True, False])
def test_only_the_tokenizer_file_says_what_is_put_around_a_text(flag: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tiny.tiny_checkpoint(tmp_path, "llama")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single=["<|endoftext|>", "$A"], special_tokens=[("<|endoftext|>", 0)]
    )
    backend.enable_truncation(4)  # as some are saved; a prompt is never cut
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": flag}))
    ids = load_tokenizer(open_checkpoint(folder)).encode("a text of some length")
    assert ids == AutoTokenizer.from_pretrained(folder)("a text of some length")["input_ids"]
    assert len(ids) > 10 and ids[0] == 0


def test_a_text_that_is_no_unicode_is_an_error(byte_level: Tokenizer) -> None:
    with pytest.raises(ValueError, match="not valid Unicode"):
        byte_level.encode("a\ud800")


def test_the_empty_text_has_no_tokens(byte_level: Tokenizer) -> None:
    assert byte_level.encode("") == [] and byte_level.decode([]) == ""


# decoding


def pushed(tokenizer: Tokenizer, tokens: list[int], **settings: bool) -> list[str]:
    decoder = tokenizer.decoder(**settings)
    return [*(decoder.push(token) for token in tokens), decoder.flush()]


def test_an_unfinished_character_is_held_back(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("a🦙é!")
    assert len(tokens) == 1 + 4 + 2 + 1
    assert pushed(byte_level, tokens) == ["a", "", "", "", "🦙", "", "é", "!", ""]
    assert pushed(byte_level, tokens[:3]) == ["a", "", "", "\ufffd"]
    assert pushed(byte_level, [*tokens[:3], *tokens[5:]]) == ["a", "", "", "\ufffd", "é", "!", ""]


def test_special_tokens_are_no_text(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("<|im_start|>the<|im_end|>é")
    assert byte_level.decode(tokens) == "theé"
    assert byte_level.decode([tokens[0], tokens[3], 2, tokens[4]]) == "é"  # also between the bytes of one character


@pytest.mark.parametrize("kind", ["real", "byte level", "sentencepiece", "sentencepiece without prefix"])
def test_pieces_add_up_to_the_whole(kind: str, smollm2: Tokenizer, byte_level: Tokenizer, tmp_path: Path) -> None:
    if kind.startswith("sentencepiece"):
        tokenizer = sentencepiece(tmp_path, tokenizer__ggml__add_space_prefix="without" not in kind)
    else:
        tokenizer = smollm2 if kind == "real" else byte_level
    rng = random.Random(0)
    for _ in range(100):
        tokens = rng.choices(range(tokenizer.size), k=rng.randrange(1, 30))
        pieces = pushed(tokenizer, tokens)
        assert "".join(pieces) == tokenizer.decode(tokens)
        data = b"".join(tokenizer.token_bytes(token) or b"" for token in tokens).decode("utf-8", errors="replace")
        assert tokenizer.decode(tokens) in (data, data.removeprefix(" "))
    for text in (STRESS, " two spaces", "  ", "x", "\n", "é", ""):
        tokens = tokenizer.encode(text, special=False)
        assert tokenizer.decode(tokens) == text


def test_decoding_is_that_of_the_tokenizers_library(smollm2: Tokenizer, smollm2_path: Path, tmp_path: Path) -> None:
    backend = gguf_backend(read_gguf(smollm2_path).metadata, smollm2_path)
    spm, spm_backend = sentencepiece(tmp_path), gguf_backend(read_gguf(tmp_path / "spm.gguf").metadata, "spm.gguf")
    rng = random.Random(1)
    for _ in range(50):
        tokens = rng.choices(range(smollm2.size), k=20)
        assert smollm2.decode(tokens) == backend.decode(tokens)
        tokens = [*rng.choices(range(259, spm.size), k=20), *spm.encode(STRESS, special=False)]
        assert spm.decode(tokens) == spm_backend.decode(tokens)


def test_the_first_space_of_a_word_belongs_to_what_it_continues(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    assert pushed(tokenizer, [284, 281]) == ["hello", " world", ""]
    assert pushed(tokenizer, [1, 284, 281]) == ["", "hello", " world", ""]
    assert pushed(tokenizer, [281], continues=True) == [" world", ""]
    assert pushed(tokenizer, [285, 281]) == [" ", " world", ""]


def test_bytes_of_a_token(smollm2: Tokenizer, byte_level: Tokenizer, tmp_path: Path) -> None:
    assert smollm2.token_bytes(smollm2.encode(" the")[0]) == b" the"
    assert [byte_level.token_bytes(token) for token in byte_level.encode("é")] == [b"\xc3", b"\xa9"]
    assert byte_level.token_bytes(2) is None and byte_level.token_bytes(300) is None
    assert byte_level.token_text(2) == "<|im_end|>" and byte_level.token_id("<|im_end|>") == 2
    assert byte_level.token_text(300) is None and byte_level.token_id("nothing") is None
    tokenizer = sentencepiece(tmp_path)
    assert [tokenizer.token_bytes(token) for token in (1, 13, 284, 296)] == [None, b"\n", b" hello", b"<tool>"]


# end tokens, names, chats


def test_end_tokens_are_a_set(smollm2: Tokenizer, byte_level: Tokenizer, tiny_folder: Path, tmp_path: Path) -> None:
    assert smollm2.eos_tokens == {0, 2}  # <|endoftext|> and <|im_end|>
    assert byte_level.eos_tokens == {2}
    path = tiny.tiny_gguf(tmp_path / "x.gguf", tiny_folder, tokenizer__ggml__eot_token_id=7, tokenizer__ggml__eom_token_id=8)
    assert load_tokenizer(open_checkpoint(path)).eos_tokens == {0, 2, 7, 8}


def test_a_turns_end_in_the_template_ends_a_text_even_if_not_configured(tmp_path: Path) -> None:
    folder = tiny.tiny_checkpoint(tmp_path, "llama", eos_token_id=0)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|endoftext|>"}))
    assert load_tokenizer(open_checkpoint(folder)).eos_tokens == {0, 2}


def test_rows_that_only_pad_the_embedding_have_no_name(tiny_folder: Path, tmp_path: Path) -> None:
    words = [*load_tokenizer(open_checkpoint(tiny_folder)).vocabulary[:290], *(f"[PAD{i}]" for i in range(290, 300))]
    path = tiny.tiny_gguf(
        tmp_path / "x.gguf",
        tiny_folder,
        tokenizer__ggml__tokens=words,
        tokenizer__ggml__token_type=[3] * 4 + [1] * 286 + [5] * 10,
        tokenizer__ggml__merges=["t h"],
    )
    tokenizer = load_tokenizer(open_checkpoint(path))
    assert tokenizer.size == 290 and tokenizer.token_text(290) is None and tokenizer.token_bytes(295) is None
    assert open_checkpoint(path).config.vocab_size == 300


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say <|im_end|> {{ 1 }} é\n"},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "Why?"},
]


def test_chats_of_the_real_model(smollm2: Tokenizer) -> None:
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    turn = "<|im_start|>user\nhi<|im_end|>\n"
    messages = [{"role": "user", "content": "hi"}]
    assert smollm2.has_chat_template
    assert smollm2.chat_text(messages, add_generation_prompt=False) == system + turn
    assert smollm2.chat_text(messages) == system + turn + "<|im_start|>assistant\n"
    assert smollm2.chat(messages) == smollm2.encode(system + turn + "<|im_start|>assistant\n")
    assert smollm2.chat(messages)[:3] == [1, 9690, 198]


# what templates in use do beyond the tiny one: trimming, loops with break, JSON, dates, namespaces, generation marks, tools
TEMPLATES = [
    tiny.CHAT_TEMPLATE,
    "{{ bos_token }}{% for message in messages %}\n    {%- if message.role == 'system' %}\n    {% continue %}\n    "
    "{%- endif %}\n"
    "    [{{ loop.index0 }}] {{ message['content'] | trim }}\n{% endfor %}\n{% if add_generation_prompt %}>{% endif %}\n",
    "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{% set ns.n = ns.n + m.content | length %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% break %}{% endif %}"
    "{%- endfor -%}"
    "{{ ns.n }} {{ messages | tojson }} {{ messages[0] | tojson(indent=2) }} {{ strftime_now('%Y') | length }}",
    "{% if tools is not none %}{{ tools | tojson }}{% endif %}{% if documents is defined and documents %}x{% endif %}"
    "{{ enable_thinking is defined and enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    "variables", [{}, {"enable_thinking": True, "tools": [{"type": "function", "function": {"name": "f<>", "parameters": {}}}]}]
)
def test_chats_are_those_of_transformers(template: str, variables: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tiny.tiny_tokenizer(tmp_path, chat_template=template)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = folder_tokenizer(tmp_path)
    expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, **variables)
    assert ours.chat_text(CHAT, **variables) == expected
    ids = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True, **variables)["input_ids"]
    assert ours.chat(CHAT, **variables) == ids


def folder_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder that has no model; give it a tiny one."""
    if not (folder / "config.json").is_file():
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        tiny.tiny_checkpoint(folder, "llama")
        for name, content in files.items():
            (folder / name).write_bytes(content)
    return load_tokenizer(open_checkpoint(folder))


def test_a_template_may_lie_in_its_own_file(tmp_path: Path) -> None:
    tiny.tiny_checkpoint(tmp_path, "llama")
    (tmp_path / "chat_template.jinja").write_text("own {{ messages[0].content }}")
    assert load_tokenizer(open_checkpoint(tmp_path)).chat_text([{"role": "user", "content": "x"}]) == "own x"
    (tmp_path / "chat_template.jinja").unlink()
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    by_name = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": by_name}))
    assert load_tokenizer(open_checkpoint(tmp_path)).chat_text([]) == "named"


def with_template(template: str | None, folder: Path) -> Tokenizer:
    tiny.tiny_tokenizer(folder, chat_template=template)
    return folder_tokenizer(folder)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the model has no chat template; give a plain prompt, or use an instruction-tuned model"),
        ("{% for %}", "the model's chat template cannot be parsed: "),
        (
            "{{ raise_exception('roles must alternate') }}",
            "the model's chat template refuses these messages: roles must alternate",
        ),
        ("{{ messages[0].content.nothing.more }}", "the model's chat template refuses these messages: "),
        ("{{ messages.__class__.__mro__ }}", "the model's chat template refuses these messages: "),
        ("{{ messages.append(1) }}", "the model's chat template refuses these messages: "),
        ("{{ messages[0].content + 1 }}", "the model's chat template refuses these messages: "),
    ],
)
def test_a_chat_that_cannot_be_rendered_says_why(template: str | None, message: str, tmp_path: Path) -> None:
    tokenizer = with_template(template, tmp_path)
    with pytest.raises(ValueError) as error:
        tokenizer.chat([{"role": "user", "content": "x"}])
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_empty_fields_of_a_message_are_left_out_and_those_deeper_are_kept(tmp_path: Path) -> None:
    tokenizer = with_template(
        "{{ messages[0] | tojson }} {{ messages[0].tool_calls is defined }} {{ tools | tojson }}", tmp_path
    )
    text = tokenizer.chat_text([{"content": "x", "tool_calls": None}], tools=[{"default": None}])
    assert text == '{"content": "x"} False [{"default": null}]'


def test_messages_must_be_plain_data(byte_level: Tokenizer) -> None:
    with pytest.raises(ValueError, match="a set is no text, number, list or mapping"):
        byte_level.chat([{"role": "user", "content": {1, 2}}])


# vocabularies


def test_vocabularies_are_compared_by_content(byte_level: Tokenizer, tiny_folder: Path, tmp_path: Path) -> None:
    same = load_tokenizer(open_checkpoint(tiny.tiny_gguf(tmp_path / "x.gguf", tiny_folder)))
    assert byte_level.mismatch(same) is None and byte_level.vocabulary_fingerprint == same.vocabulary_fingerprint
    words = list(byte_level.vocabulary)
    words[5], words[17] = words[17], words[5]
    swapped = load_tokenizer(open_checkpoint(tiny.tiny_gguf(tmp_path / "y.gguf", tiny_folder, tokenizer__ggml__tokens=words)))
    assert byte_level.mismatch(swapped) == (
        f"the vocabularies differ in 2 of 300 ids: 5 is {words[17]!r} and {words[5]!r}, 17 is {words[5]!r} and {words[17]!r}"
    )
    assert byte_level.mismatch(swapped, 17) == f"the vocabularies differ in 1 of 17 ids: 5 is {words[17]!r} and {words[5]!r}"
    assert byte_level.mismatch(swapped, 5) is None
    assert byte_level.vocabulary_fingerprint != swapped.vocabulary_fingerprint


def test_a_longer_vocabulary_matches_on_what_both_have(
    smollm2: Tokenizer, byte_level: Tokenizer, tiny_folder: Path, tmp_path: Path
) -> None:
    longer = Backend.from_file(str(tiny_folder / "tokenizer.json"))
    longer.add_tokens(["<extra>"])
    tokenizer = Tokenizer(longer)
    assert tokenizer.size == 301 and byte_level.mismatch(tokenizer) is None and tokenizer.mismatch(byte_level) is None
    assert "differ in" in (byte_level.mismatch(smollm2) or "")


# what is not right


def test_a_tokenizer_that_is_not_known_names_those_that_are(tiny_folder: Path, tmp_path: Path) -> None:
    def fails(message: str, **metadata: Any) -> None:
        checkpoint = open_checkpoint(tiny.tiny_gguf(tmp_path / "x.gguf", tiny_folder, **metadata))
        with pytest.raises(ValueError) as error:
            load_tokenizer(checkpoint)
        assert message in str(error.value) and str(tmp_path) in str(error.value)

    fails("unknown pre-tokenizer 'kimi-k2'; those that are known: a.x-4.0, ", tokenizer__ggml__pre="kimi-k2")
    fails("of kind 't5'; those that can be read are gpt2 (BPE) and llama (SPM)", tokenizer__ggml__model="t5")
    fails("of kind None", tokenizer__ggml__model=None)
    fails("the tokenizer in it is damaged (", tokenizer__ggml__merges=["t h", "nothing known"])
    fails("the tokenizer in it is damaged (", tokenizer__ggml__token_type=[1, 1])
    fails("the tokenizer in it is damaged (", tokenizer__ggml__model="llama")  # which needs scores


def test_a_damaged_tokenizer_file_is_named(tmp_path: Path) -> None:
    folder = tiny.tiny_checkpoint(tmp_path, "llama")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: cannot be read \(.*\); fetch it again"):
        load_tokenizer(open_checkpoint(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"there is no tokenizer that can be read \(.*\); add its tokenizer.json") as error:
        load_tokenizer(open_checkpoint(folder))
    assert "\n" not in str(error.value)


def test_older_formats_are_read_through_transformers(tmp_path: Path, byte_level: Tokenizer) -> None:
    folder = tiny.tiny_checkpoint(tmp_path, "llama")
    content = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(content["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(merge) for merge in content["merges"]))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "GPT2Tokenizer", "unk_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(open_checkpoint(folder))
    assert tokenizer.encode("the world, é 123") == byte_level.encode("the world, é 123")
    assert tokenizer.decode(tokenizer.encode("the world, é 123")) == "the world, é 123"


def test_wordpiece_is_decoded(tmp_path: Path) -> None:
    from tokenizers import decoders, models

    words = ["[UNK]", "hello", "wor", "##ld", "##s"]
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    tokenizer = Tokenizer(backend)
    assert pushed(tokenizer, tokenizer.encode("hello worlds")) == ["hello", " wor", "ld", "s", ""]


def test_a_decoder_that_is_not_supported_is_named() -> None:
    from tokenizers import decoders, models

    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.CTC()
    with pytest.raises(ValueError, match="tokens are decoded by CTC, which is not supported"):
        Tokenizer(backend)
