"""How each kind of op carries the axis of the tokens, or mixes tokens along it. Elementwise ops are known by a tag."""

import math
from collections.abc import Callable

from torch.fx import Node

from octavo.compiler.token_flow import Call, Depends, Flow, Mixes, expression, op_name, sizes

Rule = Callable[[Call], Flow]


def keep(call: Call) -> Flow:
    return call.operand()


def elementwise(call: Call) -> Flow:
    """Operands broadcast from the right. Two different token axes make a value of pairs."""
    return _joined(call, [n for n in call.node.all_input_nodes if sizes(n)], len(sizes(call.node)))


def _joined(call: Call, operands: list[Node], rank: int) -> Flow:
    flows = [
        call.flows[n].moved(lambda axis, n=n: axis + rank - len(sizes(n)))  # type: ignore[misc]
        for n in operands
    ]
    pair = next((f for f in flows if f.is_pair), None)
    axes = list(pair.axes) if pair is not None else []
    for flow in flows:
        axes += [axis for axis in flow.axes if axis not in axes]
    softmax = any(f.softmax for f in flows)
    return Flow(call.depends, softmax=softmax).at(axes if pair is not None else sorted(axes))


def reshape(call: Call) -> Flow:
    """An axis stays where the sizes in front of it multiply to the same."""
    before, after = ([expression(s) for s in sizes(n)] for n in (call.node.args[0], call.node))

    def to(axis: int) -> int | None:
        front = math.prod(before[:axis])
        places = [i for i, size in enumerate(after) if size == before[axis] and math.prod(after[:i]) == front]
        return places[0] if places else None

    moved = call.operand().moved(to)
    return moved if len(moved.axes) == len(call.operand().axes) else call.lost


def expand(call: Call) -> Flow:
    shift = len(sizes(call.node)) - call.rank()
    return call.operand().moved(lambda axis: axis + shift)


def repeat(call: Call) -> Flow:
    flow = expand(call)
    same = all(
        expression(sizes(call.node)[new]) == expression(sizes(call.node.args[0])[old])
        for new, old in zip(flow.axes, call.operand().axes, strict=True)
    )
    return flow if same else call.lost


def repeat_interleave(call: Call) -> Flow:
    return call.lost if call.argument("dim") is None or _touches(call) else call.operand()


def permute(call: Call) -> Flow:
    rank = call.rank()
    order = list(range(rank))
    if call.name == "permute":
        order = call.dims("dims")
    elif call.name == "movedim":
        moved = list(zip(call.dims("destination"), call.dims("source"), strict=True))
        order = [axis for axis in order if axis not in {source for _, source in moved}]
        for place, source in sorted(moved):
            order.insert(place, source)
    else:
        given = (call.argument("dim0"), call.argument("dim1"))
        first, second = (-2, -1) if None in given else given
        if rank >= 2:
            order[first], order[second] = order[second], order[first]
    return call.operand().moved(order.index)


def _touches(call: Call, name: str = "dim") -> bool:
    return any(axis in call.dims(name) for axis in call.operand().axes)


def part(call: Call) -> Flow:
    """A slice, or equal parts. Of pairs it takes what a sink added; of tokens it is a shift or a loop."""
    flow = call.operand()
    whole, got = sizes(call.node.args[0]), sizes(call.node)
    if not _touches(call) or flow.is_pair or not flow.matters:
        return flow
    dim = call.dims()[0]
    if expression(whole[dim]) == expression(got[dim]) or not _is_length(call, dim):
        return flow  # all of them, or the tokens again out of what a named convolution or shift made longer
    start, end = call.argument("start"), call.argument("end")
    span = "" if call.name != "slice" else f" {_text(start)}:{_text(end)}"
    raise Mixes(f"{call.name} over tokens{span}: a shift or a loop, which reads state of other tokens")


def _is_length(call: Call, dim: int) -> bool:
    return bool(expression(sizes(call.node.args[0])[dim]) == expression(call.length))


def _text(bound: object) -> str:
    return "" if bound is None or (isinstance(bound, int) and bound > 1 << 60) else str(bound)


def select(call: Call) -> Flow:
    """One element of an axis, or each (unbind)."""
    flow, (dim, *_) = call.operand(), call.dims()
    if dim in flow.axes and flow.matters and not flow.is_pair:
        which = f"token {call.argument('index')}" if call.name == "select" else "tokens one by one"
        raise Mixes(f"{call.name} of {which}: a loop over tokens with state")
    return flow.moved(lambda axis: None if axis == dim else axis - (axis > dim))


def cat(call: Call) -> Flow:
    parts = call.node.args[0]
    assert isinstance(parts, list | tuple)
    operands = [n for n in parts if isinstance(n, Node) and len(sizes(n)) == len(sizes(call.node))]
    dim = int(call.argument("dim") or 0) % len(sizes(call.node))
    flow = _joined(call, operands, len(sizes(call.node)))
    if any(dim in call.flows[n].axes for n in operands) and flow.matters and not flow.is_pair:
        raise Mixes("cat over tokens: tokens or state of other steps are put next to them")
    return flow


def stack(call: Call) -> Flow:
    dim = int(call.argument("dim") or 0) % len(sizes(call.node))
    parts = [n for n in call.node.all_input_nodes if sizes(n)]
    return _joined(call, parts, len(sizes(parts[0]))).moved(lambda axis: axis + (axis >= dim))


def pad(call: Call) -> Flow:
    flow, widths = call.operand(), list(call.argument("pad"))
    for axis in flow.axes:
        place = 2 * (call.rank() - 1 - axis)
        width = widths[place : place + 2]
        if any(w != 0 for w in width) and flow.matters and not flow.is_pair:
            raise Mixes(
                f"padding of the tokens by {tuple(width)}: a shift of tokens, state outside attention"
            )
    return flow


def linear(call: Call) -> Flow:
    flow = call.operand()
    if flow.matters and call.rank() - 1 in flow.axes:
        raise Mixes("linear over tokens: every token is mixed with every other")
    return flow


def embedding(call: Call) -> Flow:
    """aten has the table first; a row of it for each id."""
    return call.operand(1)


def matmul(call: Call) -> Flow:
    first = 1 if call.name in ("baddbmm", "addmm") else 0
    a, b = call.node.args[first], call.node.args[first + 1]
    if not isinstance(a, Node) or not isinstance(b, Node) or min(len(sizes(a)), len(sizes(b))) < 2:
        return call.lost
    rank = max(len(sizes(a)), len(sizes(b)))
    letters = [chr(ord("a") + i) for i in range(rank - 2)]
    left = "".join([*letters[rank - len(sizes(a)) :], "x", "s"])
    right = "".join([*letters[rank - len(sizes(b)) :], "s", "y"])
    return _contract(call, [(a, left), (b, right)], "".join([*letters, "x", "y"]))


def einsum(call: Call) -> Flow:
    equation, operands = call.node.args[0], call.node.args[1]
    if not isinstance(equation, str) or not isinstance(operands, list | tuple) or "..." in equation:
        return call.lost
    terms, _, out = equation.replace(" ", "").partition("->")
    return _contract(call, list(zip(operands, terms.split(","), strict=True)), out)  # type: ignore[arg-type]


def _contract(call: Call, terms: list[tuple[Node, str]], out: str) -> Flow:
    """Sums over letters that the result lacks. Over tokens that is attention, or state."""
    flows = [(call.flows[node], letters) for node, letters in terms]
    tokens: list[str] = []
    for flow, letters in sorted(flows, key=lambda item: not item[0].is_pair):
        tokens += [letters[axis] for axis in flow.axes if letters[axis] not in tokens]
    summed = [letter for letter in tokens if letter not in out]
    weights = [(f, names) for f, names in flows if f.softmax and f.keys is not None]
    is_attention = len(weights) == 1 and summed == [weights[0][1][weights[0][0].keys or 0]]
    if summed and not is_attention and call.depends is Depends.TOKENS:
        fixed = [f for f, names in flows if not f.matters and any(s in names for s in summed)]
        what = "a matrix of fixed weights mixes the tokens" if fixed else "linear attention or a recurrence"
        raise Mixes(f"{call.name} over tokens without a softmax: {what}")
    return Flow(call.depends).at([out.index(letter) for letter in tokens if letter in out])


def sdpa(call: Call) -> Flow:
    q, k = call.operand(0), call.operand(1)
    if q.axis is None and k.matters and k.axes:
        raise Mixes("attention of fixed queries over all tokens: pooling")
    return Flow(call.depends).at(q.axes)


def softmax(call: Call) -> Flow:
    flow, (dim, *_) = call.operand(), call.dims()
    if dim not in flow.axes:
        return flow
    if not flow.is_pair and flow.matters:
        raise Mixes(f"{call.name} over tokens that is not over the keys of q k^T: pooling")
    rows = [axis for axis in flow.axes if axis != dim]
    return Flow(flow.depends, softmax=True).at([*rows, dim])


def reduction(call: Call) -> Flow:
    if getattr(call.node.target, "_overloadname", "") == "other":
        return elementwise(call)  # the larger of two tensors
    flow, dims = call.operand(), call.dims()
    kept = bool(call.argument("keepdim"))
    if any(axis in dims for axis in flow.axes):
        if flow.matters and not call.is_integer and not _cancels(call):
            raise Mixes(f"{call.name} over tokens: a value of the whole sequence, state outside attention")
        if flow.matters and not flow.is_pair:
            return call.lost
    return flow.moved(
        lambda axis: None if axis in dims else axis if kept else axis - sum(d < axis for d in dims)
    )


def _cancels(call: Call) -> bool:
    """The largest score of each query, which is subtracted from its scores and does nothing to their softmax."""
    readers = [u for user in call.node.users for u in (user.users if op_name(user) == "getitem" else [user])]
    of_scores = call.operand().is_pair and call.name in ("amax", "max")
    scores = call.node.args[0]
    return of_scores and all(op_name(u) == "aten::sub" and u.args[0] is scores for u in readers)


def whole(call: Call) -> Flow:
    """Ops that give a value of the operand's shape by reading along an axis."""
    flow = call.operand()
    if _touches(call, "dims" if call.name in ("flip", "roll") else "dim") and flow.matters:
        if call.is_integer and call.name not in ("roll", "flip"):
            return call.lost
        raise Mixes(f"{call.name} over tokens: {WHOLE[call.name]}")
    return flow


WHOLE = {
    "cumsum": "a running sum, state outside attention", "cumprod": "a running product, state outside attention",
    "logcumsumexp": "a running sum, state outside attention", "cummax": "a running maximum, state outside attention",
    "cummin": "a running minimum, state outside attention", "flip": "tokens read backwards",
    "roll": "token shift, state of other tokens", "sort": "tokens ranked against each other",
    "argsort": "tokens ranked against each other", "topk": "tokens ranked against each other",
    "fft_rfft": "a Fourier transform of the sequence", "fft_fft": "a Fourier transform of the sequence",
    "fft_irfft": "a Fourier transform of the sequence", "diff": "token shift, state of other tokens",
    "glu": "the two halves of the sequence are multiplied",
}  # fmt: skip


def convolution(call: Call) -> Flow:
    flow, weight = call.operand(), sizes(call.node.args[1])
    spatial = len(weight) - 2
    for axis in flow.axes:
        place = axis - (call.rank() - spatial)
        if place >= 0 and flow.matters and weight[2 + place] != 1:
            steps = call.argument("dilation") or [1]
            tokens = (weight[2 + place] - 1) * int(steps[place % len(steps)])
            raise Mixes(f"convolution over tokens: state of {tokens} tokens outside attention")
    return flow


def pooling(call: Call) -> Flow:
    flow = call.operand()
    if flow.matters and call.rank() - 1 in flow.axes:
        raise Mixes(f"{call.name} over tokens: state of neighbouring tokens outside attention")
    return flow


def recurrent(call: Call) -> Flow:
    if call.operand().matters:
        raise Mixes(f"{call.name} over tokens: a recurrent network, whose state lies outside attention")
    return call.lost


def normalized(call: Call) -> Flow:
    """layer_norm and rms_norm over the last axes; group_norm over all but the first."""
    flow, shape = call.operand(), call.argument("normalized_shape")
    first = 1 if shape is None else call.rank() - len(shape)
    if flow.matters and any(axis >= first for axis in flow.axes):
        raise Mixes(f"{call.name} over tokens: mean and variance of the whole sequence")
    return flow


def index(call: Call) -> Flow:
    """x[i, :, j]: the axes of the index tensors stand where the first of them was."""
    flow, indices = call.operand(), list(call.argument("indices"))
    used = [i for i, value in enumerate(indices) if isinstance(value, Node)]
    chosen = [indices[i] for i in used]
    if any(axis in used for axis in flow.axes):
        if flow.matters and not flow.is_pair and all(call.flows[n].depends < Depends.TOKENS for n in chosen):
            raise Mixes("index of tokens at fixed places: token shift, state of other tokens")
        return call.lost
    width = max(len(sizes(n)) for n in chosen)
    own = flow.moved(lambda axis: axis - sum(u < axis for u in used) + (width if axis > used[0] else 0))
    picked = _joined(call, chosen, width).moved(lambda axis: axis + used[0])
    return Flow(call.depends).at(list(dict.fromkeys((*own.axes, *picked.axes))))


def gather(call: Call) -> Flow:
    flow, where = call.operand(0), call.operand(2)
    if call.dims()[0] in flow.axes and flow.matters:
        if where.depends < Depends.TOKENS:
            raise Mixes(f"{call.name} of tokens at fixed places: token shift, state of other tokens")
        return call.lost
    if call.name == "index_select":
        return flow
    return Flow(call.depends).at(list(dict.fromkeys((*flow.axes, *where.axes))))


def written(call: Call) -> Flow:
    """slice_scatter, select_scatter: a part of the operand gets new values."""
    flow, source = call.operand(0), call.operand(1)
    if call.name == "slice_scatter" and _is_whole(call):
        return Flow(call.depends).at(list(dict.fromkeys((*flow.axes, *source.axes))))
    if call.dims()[0] in (*flow.axes, *(() if call.name == "select_scatter" else source.axes)):
        if source.matters or flow.matters:
            raise Mixes(f"{call.name} over tokens: a loop over tokens with state")
    if call.name == "select_scatter" and source.axes:
        dim = call.dims()[0]
        source = source.moved(lambda axis: axis + (axis >= dim))
    return Flow(call.depends).at(list(dict.fromkeys((*flow.axes, *source.axes))))


def _is_whole(call: Call) -> bool:
    old, new = (sizes(n)[call.dims()[0]] for n in call.node.all_input_nodes[:2])
    return bool(expression(old) == expression(new))


def getitem(call: Call) -> Flow:
    """One of several results, all of which lie alike."""
    return call.operand()


def _table(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_table(keep, "clone contiguous detach alias dropout type_as _to_copy to lift_fresh_copy fill tril triu one_hot"),
    **_table(keep, "native_dropout batch_norm feature_dropout alpha_dropout bucketize"),
    **_table(elementwise, "masked_fill where add sub mul div pow copy"),
    **_table(reshape, "view reshape _unsafe_view unsqueeze squeeze flatten unflatten view_as"),
    **_table(expand, "expand expand_as broadcast_to"),
    **_table(permute, "permute transpose t mT swapaxes numpy_T movedim"),
    **_table(part, "slice split split_with_sizes chunk tensor_split narrow"),
    **_table(select, "select unbind"),
    **_table(matmul, "matmul mm bmm baddbmm addmm"),
    **_table(sdpa, "scaled_dot_product_attention"),
    **_table(softmax, "softmax _softmax _safe_softmax log_softmax _log_softmax"),
    **_table(reduction, "sum mean amax amin max min argmax argmin prod logsumexp std var norm linalg_vector_norm"),
    **_table(reduction, "any all median var_mean nansum count_nonzero aminmax"),
    **_table(whole, " ".join(WHOLE)),
    **_table(convolution, "conv1d conv2d convolution conv_transpose1d"),
    **_table(pooling, "avg_pool1d max_pool1d adaptive_avg_pool1d adaptive_max_pool1d max_pool1d_with_indices"),
    **_table(recurrent, "lstm gru rnn_tanh rnn_relu"),
    **_table(normalized, "layer_norm native_layer_norm rms_norm group_norm native_group_norm instance_norm"),
    **_table(gather, "gather index_select take_along_dim"),
    **_table(written, "slice_scatter select_scatter"),
    "repeat": repeat, "repeat_interleave": repeat_interleave, "cat": cat, "stack": stack,
    "constant_pad_nd": pad, "pad": pad, "linear": linear, "embedding": embedding, "einsum": einsum, "index": index,
    "getitem": getitem,
}  # fmt: skip
