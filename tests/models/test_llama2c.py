"""Files of llama2.c: the real one, one made here, and every way they can be wrong."""

import math
import struct

import numpy as np
import pytest
import torch

from tests.shared import shared_data
from tieline.core.errors import UnsupportedModelError
from tieline.models.llama2c import Header, load_llama2c, load_llama2c_tokenizer, read_header

STORIES, with_stories = shared_data("stories260K")
SIZES = (8, 12, 2, 2, 1, 20, 16)  # dim, hidden, layers, heads, key heads, vocabulary, positions


def write_model(path, sizes=SIZES, own_output=False):
    *others, vocabulary, positions = sizes
    header = Header(*others, vocabulary, positions, own_output)
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shape) * 0.3 for name, shape in header.shapes.items()}
    sign = -1 if own_output else 1
    numbers = [t.astype("<f4").tobytes() for t in tensors.values()]
    path.write_bytes(struct.pack("<7i", *others, sign * vocabulary, positions) + b"".join(numbers))
    return header, {name: torch.from_numpy(t.astype("f4")) for name, t in tensors.items()}


def reference(header, t, ids):
    """The forward pass of llama2.c, token by token, with neighbouring coordinates rotated."""

    def norm(x, w):
        return w * x / torch.sqrt(x.square().mean() + 1e-5)

    def rotate(v, position):
        size = header.dim // header.heads
        pairs = v.view(-1, size // 2, 2)
        angle = position * 10000.0 ** (-torch.arange(0, size, 2).double() / size)
        c, s = angle.cos(), angle.sin()
        turned = [pairs[..., 0] * c - pairs[..., 1] * s, pairs[..., 0] * s + pairs[..., 1] * c]
        return torch.stack(turned, dim=-1).flatten(1)

    t = {name: tensor.double() for name, tensor in t.items()}
    keys, values, logits = {}, {}, []
    for position, token in enumerate(ids):
        x = t["embed"][token]
        for n in range(header.layers):
            h = norm(x, t["att_norm"][n])
            q = rotate(t["q"][n] @ h, position)
            keys.setdefault(n, []).append(rotate(t["k"][n] @ h, position))
            values.setdefault(n, []).append((t["v"][n] @ h).view(header.key_heads, -1))
            out = []
            for head in range(header.heads):
                shared = head // (header.heads // header.key_heads)
                k = torch.stack([key[shared] for key in keys[n]])
                v = torch.stack([value[shared] for value in values[n]])
                out.append((k @ q[head] / math.sqrt(k.shape[1])).softmax(0) @ v)
            x = x + t["o"][n] @ torch.cat(out)
            h = norm(x, t["ffn_norm"][n])
            gated = torch.nn.functional.silu(t["gate"][n] @ h) * (t["up"][n] @ h)
            x = x + t["down"][n] @ gated
        logits.append(t.get("output", t["embed"]) @ norm(x, t["norm"]))
    return torch.stack(logits)


@pytest.mark.parametrize("own_output", [False, True])
def test_the_model_computes_what_llama2c_does(own_output, tmp_path):
    header, tensors = write_model(tmp_path / "m.bin", own_output=own_output)
    model = load_llama2c(tmp_path / "m.bin").double()
    ids = [3, 7, 19, 0, 5]
    with torch.no_grad():
        ours = model(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(ours, reference(header, tensors, ids), rtol=1e-5, atol=1e-6)


def test_wrong_sizes_are_refused_before_anything_is_read(tmp_path):
    path = tmp_path / "m.bin"
    write_model(path)
    whole = path.read_bytes()
    bad = [
        (whole[:20], "20 bytes"),
        (whole[:-4], "its header asks for"),
        (whole + b"\0" * 4, "its header asks for"),
        (struct.pack("<7i", 8, 12, 2, 3, 1, 20, 16) + whole[28:], "not the sizes"),
        (struct.pack("<7i", 8, 12, 2, 2, 0, 20, 16) + whole[28:], "not the sizes"),
        (struct.pack("<7i", 8, -12, 2, 2, 1, 20, 16) + whole[28:], "not the sizes"),
        (struct.pack("<7i", 2**31 - 2, 12, 2, 2, 1, 20, 16) + whole[28:], "not the sizes"),
        (struct.pack("<7i", 2**20, 2**20, 2**20, 2, 1, 2**20, 16), "its header asks for"),
    ]
    for content, message in bad:
        path.write_bytes(content)
        with pytest.raises(UnsupportedModelError, match=message):
            load_llama2c(path)


def test_weights_that_are_not_numbers_are_refused(tmp_path):
    path = tmp_path / "m.bin"
    write_model(path)
    content = bytearray(path.read_bytes())
    content[100:104] = struct.pack("<f", float("nan"))
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match="not finite"):
        load_llama2c(path)


def vocabulary(pieces):
    longest = max(len(piece) for piece, _ in pieces)
    packed = [struct.pack("<fi", score, len(piece)) + piece for piece, score in pieces]
    return struct.pack("<i", longest) + b"".join(packed)


BYTES = [(f"<0x{value:02X}>".encode(), 0.0) for value in range(256)]
PIECES = [(b"<unk>", 0.0), (b"<s>", 0.0), (b"</s>", 0.0), *BYTES]
PIECES += [(b" a", -1.0), (b"ab", 0.0), (b" ", -3.0), (b"a", -4.0), (b"b", -5.0)]


def test_the_best_pair_is_joined_first_and_bytes_serve_the_rest(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(vocabulary(PIECES))
    tokenizer = load_llama2c_tokenizer(path, len(PIECES))
    ids = tokenizer("ab é", add_special_tokens=False)["input_ids"]
    names = [PIECES[i][0] for i in ids]
    assert names == [b" ", b"ab", b" ", b"<0xC3>", b"<0xA9>"]
    assert tokenizer.decode(ids) == "ab é"
    assert tokenizer("ab é")["input_ids"] == [1, *ids]


def test_malformed_vocabularies_are_refused(tmp_path):
    path, whole = tmp_path / "t.bin", vocabulary(PIECES)
    bad = [
        (b"ab", len(PIECES), "no vocabulary"),
        (whole[:-1], len(PIECES), "is not there"),
        (whole + b"x", len(PIECES), "1 bytes after"),
        (whole, len(PIECES) + 1, "is not there"),
        (struct.pack("<ifi", 7, 0.0, -5) + b"abc", 1, "piece 0"),
        (struct.pack("<ifi", 7, 0.0, 2**30) + b"abc", 1, "piece 0"),
        (vocabulary([(b"\xff\xfe", 0.0)]), 1, "no UTF-8"),
        (vocabulary([(b"a", 0.0), (b"a", 0.0)]), 2, "the same"),
    ]
    for content, count, message in bad:
        path.write_bytes(content)
        with pytest.raises(UnsupportedModelError, match=message):
            load_llama2c_tokenizer(path, count)


@with_stories
def test_the_real_model_tells_stories():
    header = read_header(STORIES / "stories260K.bin")
    assert (header.dim, header.layers, header.vocabulary) == (64, 5, 512)
    model = load_llama2c(STORIES / "stories260K.bin")
    tokenizer = load_llama2c_tokenizer(STORIES / "tok512.bin", header.vocabulary)
    start = "Once upon a time, there was a little"
    ids = tokenizer(start, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < 1.5  # log 512 = 6.2 for a model that knows nothing
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    text = tokenizer.decode(out[0], skip_special_tokens=True)
    assert text.startswith(start + " girl named")
