"""The arithmetic of kernels/block_code.py and rounding.py as PTX, two neighbours at a time.

For kernels/wgrad_update_hopper_int8.py, which multiplies nothing while it updates a tile:
block_code.py compiled by Triton takes a fifth more instructions. The results are the same bits;
tests/test_block_code_ptx.py runs these texts. $0 and so on are operands, 32 bits each, outputs
first.
"""

# $0-1 the values; $2 two signed codes, $3 the block's scale, $4 -2^-15 of it, $5 2^20, in a
# register because else the compiler makes a shift of the product, for the busier integer unit.
DECODE_SIGNED = """{
.reg .b32 a, b, s, t;
.reg .f32 x, y;
prmt.b32 a, $2, 0, 0x8880; prmt.b32 b, $2, 0, 0x9991; // with their signs
abs.s32 s, a; abs.s32 t, b;
mad.lo.u32 s, s, $5, 0x38000000; mad.lo.u32 t, t, $5, 0x38000000;
mov.b32 x, s; mov.b32 y, t;
fma.rn.f32 x, x, $3, $4; fma.rn.f32 y, y, $3, $4;
mov.b32 s, x; mov.b32 t, y;
lop3.b32 $0, s, a, 0x80000000, 0x78; lop3.b32 $1, t, b, 0x80000000, 0x78; // x ^ (code & sign)
}"""
# The same of unsigned codes; $4 is -2^-31 of the scale.
DECODE_UNSIGNED = """{
.reg .b32 a, b;
.reg .f32 x, y;
and.b32 a, $2, 0xff; shr.u32 b, $2, 8;
mad.lo.u32 a, a, $5, 0x30000000; mad.lo.u32 b, b, $5, 0x30000000;
mov.b32 x, a; mov.b32 y, b;
fma.rn.f32 $0, x, $3, $4; fma.rn.f32 $1, y, $3, $4;
}"""
DECODE_CONSTRAINTS = "=f,=f,r,f,f,r"

# $0-1 the bits of the fp32 values of two bf16, $2.
WIDEN = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
# $0 32 random bits of the even neighbour, $1 its seeded number.
HASH = """{
.reg .b64 p;
.reg .b32 h, a, b;
mul.wide.u32 p, $1, 0x9E3779B1; mov.b64 {a, b}, p; xor.b32 h, a, b;
mul.wide.u32 p, h, 0x85EBCA77; mov.b64 {a, b}, p; xor.b32 $0, a, b;
}"""
# $0 two bf16; $1-2 their fp32 values, $3 the even one's random bits. As in wgrad_update_hopper.py
# nothing is added to a pair with a NaN, which could carry into the sign.
ROUND_STOCHASTIC = """{
.reg .f32 x, y;
.reg .b32 n, a, b;
mov.b32 x, $1; mov.b32 y, $2; set.num.u32.f32 n, x, y;
and.b32 a, $3, n; mul.lo.u32 b, a, 0x9E3779B1;
shr.u32 a, a, 16; shr.u32 b, b, 16;
add.u32 a, a, $1; add.u32 b, b, $2;
prmt.b32 $0, a, b, 0x7632;
}"""
ROUND_NEAREST = """{
.reg .f32 x, y;
mov.b32 x, $1; mov.b32 y, $2;
cvt.rn.bf16x2.f32 $0, y, x; // $3
}"""
# $0-1 two codes of the signed and of the unsigned state; $2-3 and $4-5 the bits of their values,
# $6-7 the inverse scales, $8 the even one's random bits, $9 is 0x80, in a register because `prmt`
# takes one constant and its selector is another. All is four bits to the left of
# block_code.py's numbers, so that a code is the upper byte. c and d are the random bits between 8
# and what block_code.py subtracts.
_ENCODE = """{
.reg .b32 g, a, b, c, d, e;
.reg .f32 x, y;
.reg .pred s, t;
BITS
mov.b32 x, $2; mov.b32 y, $3; abs.f32 x, x; abs.f32 y, y;
fma.rn.f32 x, x, $6, 0f38000000; fma.rn.f32 y, y, $6, 0f38000000; // + 2^-15
mov.b32 a, x; mov.b32 b, y;
SIGNED
mad.lo.u32 a, a, 16, c; mad.lo.u32 b, b, 16, d;
setp.lt.s32 s, $2, 0; setp.lt.s32 t, $3, 0;
@s sub.u32 a, 0x00ffffff, a; @t sub.u32 b, 0x00ffffff, b; // the upper byte negated
prmt.b32 $0, a, b, 0x0073;
mov.b32 x, $4; mov.b32 y, $5;
fma.rn.f32 x, x, $7, 0f30000000; fma.rn.f32 y, y, $7, 0f30000000; // + 2^-31
mov.b32 a, x; mov.b32 b, y;
UNSIGNED
mad.lo.u32 a, a, 16, c; mad.lo.u32 b, b, 16, d;
add.u32 e, $4, 0x00ffffff; min.u32 e, e, 0x01ffffff; max.u32 a, a, e; // above zero 1 at least
add.u32 e, $5, 0x00ffffff; min.u32 e, e, 0x01ffffff; max.u32 b, b, e;
prmt.b32 $1, a, b, 0x0073;
}"""
ENCODE_STOCHASTIC = (
    _ENCODE.replace("BITS", "mul.lo.u32 g, $8, 0x9E3779B1;")
    .replace("UNSIGNED", "prmt.b32 c, $8, $9, 0x5104; prmt.b32 d, g, $9, 0x5104;")
    .replace("SIGNED", "prmt.b32 c, $8, $9, 0x4324; prmt.b32 d, g, $9, 0x4324;")
)
ENCODE_NEAREST = (
    _ENCODE.replace("BITS\n", "// $9\n")
    .replace("UNSIGNED", "mov.b32 c, 0x00800080; mov.b32 d, c;")
    .replace("SIGNED", "mov.b32 c, 0x80800080; mov.b32 d, c;")
)
ENCODE_CONSTRAINTS = "=r,=r,r,r,r,r,f,f,r,r"
