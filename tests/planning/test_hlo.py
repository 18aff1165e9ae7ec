"""Reading a compiled program's text: loops, collectives, work; every number here is worked out by hand."""

import pytest

from kimi_jax.planning.hlo import Shape, read_shapes
from kimi_jax.planning.program import Program, product_flops

PROGRAM = """\
HloModule jit_extend, is_scheduled=true, num_partitions=8

FileNames
1 "model.py"

FunctionNames
1 "<module>"
2 "attend"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1 end_line=1 column=1 end_column=9}
2 {file_name_id=1 function_name_id=2 line=9 end_line=9 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%slice_and_scale (cache: bf16[64,128], at: s32[]) -> bf16[8,128] {
  %cache = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %at = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %piece = bf16[8,128]{1,0:T(8,128)(2,1)} dynamic-slice(%cache, %at, %zero), dynamic_slice_sizes={8,128}
}

%known_body (carry: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %carry = (s32[], bf16[8,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %h = bf16[8,128]{1,0} get-tuple-element(%carry), index=1
  %all-reduce.1 = bf16[8,128]{1,0} all-reduce(%h), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %next = (s32[], bf16[8,128]{1,0}) tuple(%i, %all-reduce.1)
}

%known_condition (carry: (s32[], bf16[8,128])) -> pred[] {
  %carry.1 = (s32[], bf16[8,128]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

%data_body (carry: (s32[], bf16[64,128], f32[128,32])) -> (s32[], bf16[64,128], f32[128,32]) {
  %carry.2 = (s32[], bf16[64,128]{1,0}, /*index=2*/f32[128,32]{1,0:S(1)}) parameter(0)
  %j = s32[] get-tuple-element(%carry.2), index=0
  %latents = bf16[64,128]{1,0} get-tuple-element(%carry.2), index=1
  %w = f32[128,32]{1,0:S(1)} get-tuple-element(%carry.2), index=2
  %read = bf16[8,128]{1,0} fusion(%latents, %j), kind=kLoop, calls=%slice_and_scale
  %product = f32[8,32]{1,0:S(1)} dot(%read, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %after = (s32[], bf16[64,128]{1,0}, f32[128,32]{1,0:S(1)}) tuple(%j, %latents, %w)
}

%data_condition (carry: (s32[], bf16[64,128], f32[128,32])) -> pred[] {
  %carry.3 = (s32[], bf16[64,128]{1,0}, f32[128,32]{1,0}) parameter(0)
  ROOT %going = pred[] constant(true)
}

ENTRY %main (p0: bf16[8,128], p1: bf16[64,128], p2: f32[128,32]) -> bf16[64,128] {
  %p0 = bf16[8,128]{1,0} parameter(0)
  %p1 = bf16[64,128]{1,0} parameter(1)
  %p2 = f32[128,32]{1,0:S(1)} parameter(2)
  %n = s32[] constant(0)
  %t = (s32[], bf16[8,128]{1,0}) tuple(%n, %p0)
  %loop = (s32[], bf16[8,128]{1,0}) while(%t), condition=%known_condition, body=%known_body, \
metadata={op_name="scan" stack_frame_id=1}, backend_config={"known_trip_count":{"n":"5"}}
  %u = (s32[], bf16[64,128]{1,0}, f32[128,32]{1,0}) tuple(%n, %p1, %p2)
  %loop.2 = (s32[], bf16[64,128]{1,0}, f32[128,32]{1,0}) while(%u), condition=%data_condition, body=%data_body, \
metadata={op_name="jit(extend)/while" stack_frame_id=2}
  %gather = (bf16[8,128]{1,0}, bf16[64,128]{1,0}) all-gather-start(%p0), channel_id=2, dimensions={0}
  %gathered = bf16[64,128]{1,0} all-gather-done(%gather)
  %scattered = bf16[8,128]{1,0} reduce-scatter(%gathered), channel_id=3, dimensions={0}, to_apply=%add
  %moved = (bf16[8,128]{1,0}, f32[]) all-to-all(%scattered, %n), channel_id=4
  ROOT %copy = bf16[64,128]{1,0} copy(%gathered)
}
"""


def test_shapes():
    text = "(bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, pred[3], /*index=2*/s32[], f4e2m1fn[6], u8[2,3]{1,0})"
    assert read_shapes(text) == (
        Shape(16, (8, 128), on_chip=True), Shape(8, (3,)), Shape(32, ()), Shape(4, (6,)), Shape(8, (2, 3)),
    )  # fmt: skip
    assert [shape.bytes for shape in read_shapes(text)] == [2048, 3, 4, 3, 6]


def test_loops_and_their_rounds():
    counted, data = Program(PROGRAM).loops
    assert (counted.function, counted.rounds, counted.source) == ("<module>", 5, "known")
    assert (data.function, data.rounds, data.source) == ("attend", 1, "unknown")
    _, data = Program(PROGRAM, {"attend": 2.5}).loops
    assert (data.rounds, data.source) == (2.5, "assumed")


def test_a_counter_below_a_constant_tells_the_rounds():
    # A TPU's text names no trip count: the condition compares the counter with a constant, or with one carried along.
    condition = "  %carry.1 = (s32[], bf16[8,128]{1,0}) parameter(0)\n"
    counter = condition + "  %at = s32[] get-tuple-element(%carry.1), index=0\n"
    tests = {
        "  %end = s32[] constant(7)\n  ROOT %more = pred[] compare(%at, %end), direction=LT": (7, "known"),
        "  %end = s32[] get-tuple-element(%carry.1), index=1\n  ROOT %more = pred[] compare(%at, %end), direction=LT": (
            1,
            "unknown",  # here what is carried is no constant
        ),
    }
    for text, wanted in tests.items():
        program = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"5"}}', "")
        program = program.replace(condition + "  ROOT %more = pred[] constant(true)", counter + text)
        loop = Program(program).loops[0]
        assert (loop.rounds, loop.source) == wanted
    carried = Program(
        program.replace("tuple(%n, %p0)", "tuple(%n, %m)").replace("ROOT %copy", "%m = s32[] constant(9)\n  ROOT %copy")
    )
    assert carried.loops[0].rounds == 9


def test_collectives_count_every_round():
    assert Program(PROGRAM).collectives() == {
        "all-gather": (1, 64 * 128 * 2),  # what comes out of the start, not operand and result together
        "all-reduce": (5, 5 * 8 * 128 * 2),
        "reduce-scatter": (1, 64 * 128 * 2),  # what goes in
        "all-to-all": (1, 8 * 128 * 2 + 4),
    }


def test_products_of_every_round():
    assert Program(PROGRAM).product_flops() == 2 * 8 * 32 * 128
    assert Program(PROGRAM, {"attend": 3}).product_flops() == 3 * 2 * 8 * 32 * 128


def test_traffic_takes_slices_and_leaves_out_fast_memory():
    piece = 8 * 128 * 2
    whole = 64 * 128 * 2
    a_round = (piece + 4 + piece) + piece  # the fusion reads a slice and its index, writes it; the dot reads it
    entry = (piece + whole) + (whole + piece) + (piece + 4 + piece + 4) + 2 * whole
    reduce = 5 * 2 * piece
    assert Program(PROGRAM).traffic() == entry + reduce + a_round
    assert Program(PROGRAM, {"attend": 4}).traffic() == entry + reduce + 4 * a_round


NESTED = """\
HloModule m

%only_copies (whole: s8[22,64,128]) -> s8[22,64,128] {
  %whole = s8[22,64,128]{2,1,0} parameter(0)
  ROOT %copied = s8[22,64,128]{2,1,0} copy(%whole)
}

%takes_a_slice (stack: s8[22,64,128], n: s32[]) -> s8[64,128] {
  %stack = s8[22,64,128]{2,1,0} parameter(0)
  %n = s32[] parameter(1)
  %again = s8[22,64,128]{2,1,0} fusion(%stack), kind=kLoop, calls=%only_copies
  %zero = s32[] constant(0)
  %sliced = s8[1,64,128]{2,1,0} dynamic-slice(%again, %n, %zero, %zero), dynamic_slice_sizes={1,64,128}
  ROOT %row = s8[64,128]{1,0} bitcast(%sliced)
}

%product (a: s8[22,64,128], b: s32[], c: bf16[8,128]) -> bf16[8,64] {
  %a = s8[22,64,128]{2,1,0} parameter(0)
  %b = s32[] parameter(1)
  %c = bf16[8,128]{1,0} parameter(2)
  %own = s8[64,128]{1,0} fusion(%a, %b), kind=kLoop, calls=%takes_a_slice
  ROOT %out = bf16[8,64]{1,0} convolution(%c, %own), dim_labels=bf_oi->bf
}

ENTRY %main (stack: s8[22,64,128], n: s32[], x: bf16[8,128]) -> bf16[8,64] {
  %stack = s8[22,64,128]{2,1,0} parameter(0)
  %n = s32[] parameter(1)
  %x = bf16[8,128]{1,0} parameter(2)
  ROOT %y = bf16[8,64]{1,0} fusion(%stack, %n, %x), kind=kOutput, calls=%product
}
"""


def test_a_slice_of_what_a_fusion_inside_only_copies():
    """As the TPU compiler writes products with a layer's eight-bit weight out of a stack."""
    assert Program(NESTED).traffic() == 64 * 128 + 4 + 8 * 128 * 2 + 8 * 64 * 2


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        # A plain matrix product: 8 × 16 numbers out, each of 32 products.
        ("f32[8,16]{1,0} convolution(%a, %b), dim_labels=bf_io->bf", 2 * 8 * 16 * 32),
        # The same with the kernel's 12 places read one at a time: the window covers padding but for one place.
        ("f32[8,12,16]{2,0,1} convolution(%c, %d), window={size=12 pad=11_11 rhs_reversal=1}, "
         "dim_labels=b0f_0io->b0f", 2 * 8 * 12 * 16 * 32),
        # A batch of 4 products: the batch runs along a dilated window axis that meets one place an output.
        ("f32[4,8,16]{2,1,0} convolution(%e, %f), window={size=4 stride=3 pad=0_0 lhs_dilate=4}, "
         "dim_labels=0bf_0io->0bf", 2 * 4 * 8 * 16 * 32),
        ("f32[8,16]{1,0} add(%g, %g)", 0),
    ],
)  # fmt: skip
def test_flops_of_a_tpu_product(line, flops):
    text = f"""\
ENTRY %main (a: f32[8,32]) -> f32[] {{
  %a = f32[8,32] parameter(0)
  %b = f32[32,16] parameter(1)
  %c = f32[8,1,32] parameter(2)
  %d = f32[12,32,16] parameter(3)
  %e = f32[4,8,32] parameter(4)
  %f = f32[4,32,16] parameter(5)
  %g = f32[8,16] parameter(6)
  ROOT %out = {line}
}}
"""
    program = Program(text)
    computation = program.computations["main"]
    assert product_flops(computation, computation.instructions["out"]) == flops


def test_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        Program("nothing")


KERNELS = """\
HloModule jit_extend, is_scheduled=true

FunctionNames
1 "kernel_product"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1 end_line=1 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%offloaded (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  ROOT %all-reduce.1 = bf16[8,128]{1,0} all-reduce(%p), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
}

ENTRY %main (rows: bf16[8,128], codes: u8[4,64,64]) -> bf16[8,128] {
  %rows = bf16[8,128]{1,0} parameter(0)
  %codes = u8[4,64,64]{2,1,0} parameter(1)
  %made = bf16[8,128]{1,0} custom-call(%rows, %codes), custom_call_target="tpu_custom_call", metadata={stack_frame_id=1}
  ROOT %out = bf16[8,128]{1,0} custom-call(%made), custom_call_target="other", called_computations={%offloaded}
}
"""


def test_kernels_and_what_custom_calls_run():
    """A kernel's work is told by the one who wrote it; TPU7x wraps its collectives in custom calls."""
    given = []

    def work(arrays):
        given.append([x.sizes for x in arrays])
        return 1000.0, 500.0

    program = Program(KERNELS, kernels={"kernel_product": work})
    assert program.product_flops() == 1000
    assert program.collectives() == {"all-reduce": (1, 2048)}
    assert program.traffic() == 500 + 2 * 2048
    assert given[0] == [(8, 128), (4, 64, 64)]


def test_what_is_started_elsewhere_counts_once():
    """A gather as a v5p's second kind of core runs it: started empty, given its arrays by an update, calls in calls."""
    text = """\
HloModule gather, is_scheduled=true

%inner (stack: bf16[64,128], at: s32[8]) -> bf16[8,128] {
  %stack = bf16[64,128]{1,0} parameter(0)
  %at = s32[8]{0} parameter(1)
  ROOT %taken = bf16[8,128]{1,0} gather(%stack, %at), slice_sizes={1,128}
}

%called (stack: bf16[64,128], at: s32[8]) -> bf16[8,128] {
  %stack.1 = bf16[64,128]{1,0} parameter(0)
  %at.1 = s32[8]{0} parameter(1)
  ROOT %call = bf16[8,128]{1,0} call(%stack.1, %at.1), to_apply=%inner
}

%sent (stack: bf16[64,128], at: s32[8]) -> bf16[8,128] {
  %stack.2 = bf16[64,128]{1,0} parameter(0)
  %at.2 = s32[8]{0} parameter(1)
  %start = ((bf16[64,128]{1,0}, s32[8]{0}), bf16[8,128]{1,0}, u32[]) async-start(%stack.2, %at.2), calls=%called
  ROOT %done = bf16[8,128]{1,0} async-done(%start)
}

ENTRY %main (p0: bf16[64,128], p1: s32[8]) -> bf16[8,128] {
  %p0 = bf16[64,128]{1,0} parameter(0)
  %p1 = s32[8]{0} parameter(1)
  %empty = ((), (), (s32[8]{0})) async-start(), calls=%sent
  %given = ((bf16[64,128]{1,0}, s32[8]{0}), bf16[8,128]{1,0}, (s32[8]{0})) async-update(%empty, %p0, %p1)
  ROOT %made = bf16[8,128]{1,0} async-done(%given)
}
"""
    assert Program(text).traffic() == 2 * 8 * 128 * 2
