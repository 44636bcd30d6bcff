"""The operations that multiply, solve, branch and loop in random bodies."""

from __future__ import annotations

from .operations import Operation
from .programs import Builder, NotPossible, Value, broadcast

SCALES = ["", "0.5 * ", ""]


def _kind(*values: Value) -> str:
    return "c" if any(v.type.kind == "c" for v in values) else "f"


def _dots(a: Value, b: Value) -> tuple[str, str, str]:
    """Of both operands of an einsum, and of its result."""
    left, right = ("..." if v.type.rows else "" for v in (a, b))
    return left, right, left or right


def vector_weights(g: Builder) -> Value:
    """`h @ W` and `W @ h`."""
    h = g.pick(lambda t: len(t.shape) >= 1, "fffc")
    size = h.type.shape[-1]
    w = g.pick(lambda t: not t.rows and len(t.shape) == 2 and size in t.shape, "fffc")
    scale, lead, kind = g.choice(SCALES), h.type.shape[:-1], _kind(h, w)
    right = w.type.shape[0] == size
    if right and (g.chance(50) or w.type.shape[1] != size):
        text = g.choice(["{0} @ {1}", "jnp.einsum('...d,de->...e', {0}, {1})", "jnp.tensordot({0}, {1}, 1)",
                         "jnp.matmul({0}, {1})"])  # fmt: skip
        return g.emit(scale + text, [h, w], None, (*lead, w.type.shape[1]), kind)
    texts = ["jnp.einsum('ed,...d->...e', {1}, {0})", "({1} @ {0}[..., None])[..., 0]", "{0} @ {1}.T"]
    if len(h.type.shape) == 1 and not (h.type.rows and g.batch):
        texts += ["{1} @ {0}"] * 4
    if w.type.shape[1] != size:
        raise NotPossible
    return g.emit(scale + g.choice(texts), [h, w], None, (*lead, w.type.shape[0]), kind)


def to_scalar(g: Builder) -> Value:
    """A product of rank 0."""
    h = g.pick(lambda t: len(t.shape) == 1, "fffc")
    only = g.chance(60)  # weights, mostly
    w = g.pick(lambda t: t.shape == h.type.shape and not (only and t.rows), "fffc")
    reads, kind = [h, w], _kind(h, w)
    if w.type.rows and h.type.rows and g.batch:
        text = g.choice(
            ["jnp.einsum('...d,...d->...', {0}, {1})", "jnp.sum({0} * {1}, axis=-1)", "jnp.vecdot({0}, {1})"]
        )
        text = text if "vecdot" not in text or kind == "f" else "jnp.sum({0} * {1}, axis=-1)"
    elif (w.type.rows or h.type.rows) and g.batch:
        reads = [h, w] if h.type.rows else [w, h]
        text = g.choice(["{0} @ {1}", "jnp.einsum('...d,d->...', {0}, {1})", "jnp.dot({0}, {1})"])
    else:
        text = g.choice(["{0} @ {1}", "{1} @ {0}", "jnp.dot({1}, {0})", "jnp.einsum('d,d->', {1}, {0})",
                         "jnp.inner({1}, {0})"])  # fmt: skip
    return g.emit(g.choice(SCALES) + text, reads, None, (), kind)


def matrices(g: Builder) -> Value:
    a = g.pick(lambda t: len(t.shape) == 2)
    b = g.pick(lambda t: len(t.shape) == 2 and t.shape[0] == a.type.shape[1])
    if b.type.rows and not a.type.rows and g.batch and g.chance(50):
        text = "jnp.einsum('ij,...jk->...ik', {0}, {1})"
    else:
        text = g.choice(["{0} @ {1}", "jnp.matmul({0}, {1})", "jnp.einsum('...ij,...jk->...ik', {0}, {1})"])
    return g.emit("0.5 * " + text, [a, b], None, (a.type.shape[0], b.type.shape[1]))


def contract(g: Builder) -> Value:
    """A matrix with weights of its shape, to a number or along one axis."""
    a = g.pick(lambda t: len(t.shape) == 2)
    w = g.pick(lambda t: t.shape == a.type.shape)
    left, right, out = _dots(a, w)
    m, n = a.type.shape
    other, kept, shape = g.choice([("ij", "", ()), ("ij", "i", (m,)), ("ij", "j", (n,)), ("ik", "jk", (n, n))])
    return g.emit(f"0.5 * jnp.einsum('{left}ij,{right}{other}->{out}{kept}', {{0}}, {{1}})", [a, w], None, shape)


def outer(g: Builder) -> Value:
    a, b = g.pick(lambda t: len(t.shape) == 1), g.pick(lambda t: len(t.shape) == 1)
    left, right, out = _dots(a, b)
    return g.emit(f"jnp.einsum('{left}i,{right}j->{out}ij', {{0}}, {{1}})", [a, b], None, a.type.shape + b.type.shape)


def three(g: Builder) -> Value:
    """A bilinear form, or a product with weights as a factor besides."""
    a = g.pick(lambda t: len(t.shape) == 1)
    w = g.pick(lambda t: not t.rows and len(t.shape) == 2 and t.shape[0] == a.type.shape[0])
    b = g.pick(lambda t: len(t.shape) == 1 and t.shape[0] == w.type.shape[1])
    left, right, out = _dots(a, b)
    kept, shape = g.choice([("", ()), ("j", b.type.shape), ("i", a.type.shape)])
    text = f"jnp.einsum('{left}i,ij,{right}j->{out}{kept}', {{0}}, {{1}}, {{2}})"
    return g.emit(text, [a, w, b], None, shape)


def convolve(g: Builder) -> Value:
    h = g.pick(lambda t: len(t.shape) == 1)
    w = g.pick(lambda t: not t.rows and len(t.shape) == 1)
    d, k = h.type.shape[0], w.type.shape[0]
    conv = f"jax.lax.conv_general_dilated({{0}}.reshape((-1, 1, {d})), {{1}}.reshape((1, 1, {k})), (1,), 'SAME')"
    return g.emit(f"{conv}.reshape({{0}}.shape)", [h, w], None, h.type.shape)


def convolve_channels(g: Builder) -> Value:
    h = g.pick(lambda t: len(t.shape) == 2)
    c, d = h.type.shape
    w = g.pick(lambda t: not t.rows and len(t.shape) == 2 and t.shape[1] == c)
    o = w.type.shape[0]
    lead = "{0}.shape[:-2]" if h.type.rows else "()"
    conv = f"jax.lax.conv_general_dilated({{0}}.reshape((-1, {c}, {d})), {{1}}[:, :, None], (1,), 'VALID')"
    return g.emit(f"{conv}.reshape({lead} + ({o}, {d}))", [h, w], None, (o, d))


def solve(g: Builder) -> Value:
    b = g.pick(lambda t: len(t.shape) == 1)
    d = b.type.shape[0]
    w = g.pick(lambda t: t.shape == (d, d))
    matrix = f"(3 * jnp.eye({d}, dtype=dtype) + 0.3 * jnp.tanh({{1}}))"
    if b.type.rows == w.type.rows or not g.batch:
        vector = "{0}[..., None]"
        text = g.choice(["jnp.linalg.solve({m}, {b})[..., 0]", "(jnp.linalg.inv({m}) @ {b})[..., 0]",
                         "jax.lax.linalg.triangular_solve({m}, {b}, left_side=True)[..., 0]"])  # fmt: skip
        text = text.replace("{m}", matrix).replace("{b}", vector)
    elif w.type.rows:
        text = f"(jnp.linalg.inv({matrix}) @ {{0}}[:, None])[..., 0]"
    else:
        text = f"jnp.linalg.solve({matrix}, {{0}}.reshape((-1, {d})).T).T.reshape({{0}}.shape)"
    return g.emit(text, [b, w], None, (d,))


def factor(g: Builder) -> Value:
    w = g.pick(lambda t: len(t.shape) == 2 and t.shape[0] == t.shape[1])
    d = w.type.shape[0]
    if g.chance(40):
        return g.emit(f"jnp.linalg.det(3 * jnp.eye({d}, dtype=dtype) + 0.3 * jnp.tanh({{0}})) / {3**d}", [w], None, ())
    text = f"jnp.linalg.cholesky(jnp.eye({d}, dtype=dtype) + {{0}} @ jnp.swapaxes({{0}}, -1, -2))"
    return g.emit(text, [w], None, (d, d))


def branch(g: Builder) -> Value:
    """A cond that reads weights; its predicate has no rows, or there is a single one."""
    a = g.pick()
    p = g.pick(lambda t: not (t.rows and g.batch))
    w = g.pick(lambda t: not t.rows and len(t.shape) <= len(a.type.shape) and broadcast_to(t.shape, a.type.shape))
    then = g.choice(["lambda a: jnp.tanh(a + {2})", "lambda a: a * {2}", "lambda a: jnp.sin(a) + {2}"])
    other = g.choice(["lambda a: a", "lambda a: a - {2}", "lambda a: jnp.zeros_like(a)"])
    if g.chance(25):
        text = f"jax.lax.switch(jnp.int32(2 * jnp.sum({{1}})) % 3, [{then}, {other}, jnp.tanh], {{0}})"
    else:
        text = f"jax.lax.cond(jnp.sum({{1}}) > 0.1, {then}, {other}, {{0}})"
    return g.emit(text, [a, p, w], None, a.type.shape)


def broadcast_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    try:
        return broadcast(shape, target) == target
    except NotPossible:
        return False


def branch_product(g: Builder) -> Value:
    """A cond with a product of weights in a branch."""
    h = g.pick(lambda t: len(t.shape) == 1)
    d = h.type.shape[0]
    w = g.pick(lambda t: not t.rows and t.shape == (d, d))
    p = g.pick(lambda t: not (t.rows and g.batch))
    text = "jax.lax.cond(jnp.sum({2}) > 0, lambda a: jnp.tanh(a @ {1}), lambda a: a, {0})"
    return g.emit(text, [h, w, p], None, (d,))


def loop(g: Builder) -> Value:
    """A loop within the step, over the rows of weights."""
    h = g.pick(lambda t: len(t.shape) == 1)
    d = h.type.shape[0]
    w = g.pick(lambda t: not t.rows and len(t.shape) == 2 and t.shape[1] == d)
    texts = [
        "jax.lax.scan(lambda c, u: (jnp.tanh(c + u), None), {0}, {1})[0]",
        "jax.lax.scan(lambda c, u: (c * jnp.sin(u), c), {0}, {1})[1][-1]",
        "treescan.fold(lambda c, u: jnp.tanh(c + u), {0}, {1})",
        "treescan.scan(lambda c, u: (jnp.tanh(c * u), c), {0}, {1}, remat='step')[1][-1]",
        "treescan.accumulate(lambda c, u: jnp.sin(c + u), {0}, {1}, reverse=True)[0]",
        "treescan.mask_scan(lambda c, u: (jnp.tanh(c + u), c), {0}, {1}, lengths=1, "
        "row_axes=dict(carry=None, x=None, y=None))[0]",
        "treescan.while_scan(lambda c: jnp.sum(jnp.square({1})) < 2.5, lambda c, u: (jnp.tanh(c + u), None), {0}, {1}).carry",
        "jax.lax.fori_loop(0, 2, lambda i, c: jnp.tanh(c + {1}[0]), {0})",
        "treescan.fori(0, 2, lambda i, c: jnp.tanh(c + {1}[0]), {0})",
        "treescan.fold_layers(lambda u, c: jnp.tanh(c + u), {0}, {1})",
    ]
    if w.type.shape[0] == d:
        texts += [
            "jax.lax.scan(lambda c, u: (jnp.tanh(c @ {1} + u), None), {0}, {1})[0]",
            "treescan.fold(lambda c, u: jnp.tanh(c @ {1} + u), {0}, {1}, remat='nested')",
            "treescan.mask_scan(lambda c, u: (jnp.tanh(c @ {1} + u), c), {0}, jnp.concatenate([{1}, {1}]), "
            f"lengths={d}, row_axes=dict(carry=None, x=None, y=None), chunk=2)[0]",
        ]
    if g.forward:
        texts.append("jax.lax.while_loop(lambda c: jnp.any(jnp.sum(jnp.square(c)) > 0.5), lambda c: 0.5 * c, {0})"
                     if not (g.batch and h.type.rows) else "jax.lax.fori_loop(0, 2, lambda i, c: c * 0.5, {0})")  # fmt: skip
    return g.emit(g.choice(texts), [h, w], None, (d,))


def mapped(g: Builder) -> Value:
    """A vmap within the step, along the last axis of weights."""
    h = g.pick(lambda t: len(t.shape) == 1)
    w = g.pick(lambda t: not t.rows and len(t.shape) == 2 and t.shape[1] == h.type.shape[0])
    text = "jax.vmap(lambda u: jnp.sum({0} * jnp.tanh(u), axis=-1), out_axes=-1)({1})"
    return g.emit(text, [h, w], None, (w.type.shape[0],))


def through_call(g: Builder) -> Value:
    """A product within jit, checkpoint or a function with a rule of its own."""
    h = g.pick(lambda t: len(t.shape) == 1)
    w = g.pick(lambda t: not t.rows and len(t.shape) == 2 and t.shape[0] == h.type.shape[0])
    text = g.choice([
        "jax.jit(lambda a, b: jnp.tanh(a @ b))({0}, {1})", "jax.checkpoint(lambda a, b: jnp.sin(a @ b))({0}, {1})",
        "own_product({0}, {1})", "jax.jit(jnp.matmul)({0}, {1})", "own_product_vjp({0}, {1})",
        "jax.nn.relu({0} @ {1}) + 0.1", "jax.jvp(lambda b: {0} @ b, ({1},), (jnp.sin({1}),))[1]",
        "jax.vmap(lambda b: {0} @ b, in_axes=1, out_axes=-1)({1})",
    ])  # fmt: skip
    return g.emit(text, [h, w], None, (w.type.shape[1],))


def sum_of_products(g: Builder) -> Value:
    """What recurrent cells are made of: products of any rank, added up."""
    parts = [g.choice(ANY_PRODUCT)(g), g.choice(ANY_PRODUCT)(g), g.pick()]
    shape = broadcast(*(v.type.shape for v in parts))
    operands = g.operands(*parts)
    kind = _kind(*parts)
    text = g.choice(["{} + {} + {}", "{} - {} + {}", "{} + ({} - {})"])
    return g.emit(text.format(*operands), parts, None, shape, kind)


ANY_PRODUCT = (vector_weights, to_scalar, to_scalar, vector_weights, three, contract)
PRODUCTS: list[tuple[int, Operation]] = [
    (16, vector_weights), (12, to_scalar), (10, sum_of_products), (5, matrices), (3, contract), (3, outer), (4, three), (3, convolve),
    (2, convolve_channels), (2, solve), (1, factor), (3, branch), (2, branch_product), (4, loop), (2, mapped), (4, through_call),
]  # fmt: skip
