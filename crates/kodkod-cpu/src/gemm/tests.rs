//! The bits of every instruction set against chains written out here.

use half::bf16;

use super::{Element, Isa, Scratch, dense, gemm_nn, gemm_nt, gemm_tn};

/// xorshift64*.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    /// A float of random sign and significand whose exponent comes from `exponents`.
    fn float(&mut self, exponents: &[u32]) -> f32 {
        let exponent = exponents[self.below(exponents.len())];
        f32::from_bits(self.next() & 0x807f_ffff | exponent << 23)
    }
}

/// Exponents of f32 to draw from.
#[derive(Clone, Copy, Debug)]
enum Values {
    /// Around 1.
    Plain,
    /// Products at the edge of the normal range, denormals among operands and sums.
    Tiny,
    /// Overflow to infinity; infinities and NaN among the operands.
    Huge,
}

impl Values {
    fn operand(self) -> &'static [u32] {
        match self {
            Values::Plain => &[124, 125, 126, 127],
            Values::Tiny => &[0, 60, 62, 63, 64, 65, 66],
            Values::Huge => &[0, 1, 127, 189, 190, 191, 253, 254, 255],
        }
    }

    fn sum(self) -> &'static [u32] {
        match self {
            Values::Plain => &[124, 127],
            Values::Tiny => &[0, 1, 2, 3],
            Values::Huge => &[0, 1, 127, 254, 255],
        }
    }
}

trait Chain: Element {
    fn from_f32(x: f32) -> Self;
    /// The chain of `k` terms from `c`; `term(i)` is the i-th pair of factors.
    fn chain(c: f32, k: usize, term: impl Fn(usize) -> (Self, Self)) -> f32;
}

impl Chain for f32 {
    fn from_f32(x: f32) -> Self {
        x
    }

    fn chain(c: f32, k: usize, term: impl Fn(usize) -> (f32, f32)) -> f32 {
        (0..k).map(term).fold(c, |c, (a, b)| a.mul_add(b, c))
    }
}

impl Chain for bf16 {
    fn from_f32(x: f32) -> Self {
        bf16::from_bits((x.to_bits() >> 16) as u16)
    }

    fn chain(mut c: f32, k: usize, term: impl Fn(usize) -> (bf16, bf16)) -> f32 {
        fn daz(x: f32) -> f64 {
            if x.is_subnormal() { 0.0 * f64::from(x) } else { f64::from(x) }
        }
        let link = |c: f32, (a, b): (bf16, bf16)| {
            let exact = daz(a.to_f32()) * daz(b.to_f32()) + daz(c);
            // Scaled up, a result that would be tiny rounds to 24 bits as it would with an unbounded exponent.
            let rounded = (exact * 2f64.powi(64)) as f32;
            if rounded.abs() < 2f32.powi(64 - 126) { 0f32.copysign(rounded) } else { exact as f32 }
        };
        let zero = (bf16::ZERO, bf16::ZERO);
        for i in (0..k).step_by(2) {
            c = link(c, if i + 1 < k { term(i + 1) } else { zero });
            c = link(c, term(i));
        }
        c
    }
}

#[derive(Clone, Copy, Debug)]
enum Form {
    Nt,
    Nn,
    Tn,
}

fn same(x: f32, y: f32) -> bool {
    x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan()
}

/// One product on every instruction set, against the chain.
fn check<T: Chain>(
    rng: &mut Rng,
    form: Form,
    (m, n, k): (usize, usize, usize),
    values: Values,
    accumulate: bool,
) {
    let (a_rows, a_cols) = if matches!(form, Form::Tn) { (k, m) } else { (m, k) };
    let (b_rows, b_cols) = if matches!(form, Form::Nt) { (n, k) } else { (k, n) };
    let pad = |rng: &mut Rng| if rng.below(2) == 0 { 0 } else { rng.below(40) };
    let (lda, ldb, mut ldc) = (a_cols + pad(rng), b_cols + pad(rng), n + pad(rng));
    if rng.below(2) == 0 {
        ldc = ldc.next_multiple_of(16); // the streaming stores need it
    }
    // Not one element more than the shape asks for: reads past the end show under a sanitizer, garbage shows here.
    let matrix =
        |rng: &mut Rng, rows: usize, cols: usize, ld: usize| -> Vec<T> {
            let len = if rows == 0 { 0 } else { (rows - 1) * ld + cols };
            (0..len)
                .map(|i| {
                    if i % ld < cols {
                        T::from_f32(rng.float(values.operand()))
                    } else {
                        T::from_f32(f32::NAN)
                    }
                })
                .collect()
        };
    let (a, b) = (matrix(rng, a_rows, a_cols, lda), matrix(rng, b_rows, b_cols, ldb));
    let element = |i: usize, j: usize, kk: usize| match form {
        Form::Nt => (a[i * lda + kk], b[j * ldb + kk]),
        Form::Nn => (a[i * lda + kk], b[kk * ldb + j]),
        Form::Tn => (a[kk * lda + i], b[kk * ldb + j]),
    };

    const POISON: f32 = f32::from_bits(0x7fc0_1234);
    let c_len = if m == 0 { 0 } else { (m - 1) * ldc + n };
    let start: Vec<f32> = (0..c_len)
        .map(|i| if accumulate && i % ldc < n { rng.float(values.sum()) } else { POISON })
        .collect();
    let want: Vec<f32> = start
        .iter()
        .enumerate()
        .map(|(at, &c)| match (at / ldc, at % ldc) {
            (i, j) if j < n => T::chain(if accumulate { c } else { 0.0 }, k, |kk| element(i, j, kk)),
            _ => c,
        })
        .collect();

    for isa in Isa::available() {
        // C starts at a cache line, so that the streaming stores run.
        let mut room = vec![POISON; c_len + 16];
        let shift = room.as_ptr().align_offset(64);
        let c = &mut room[shift..shift + c_len];
        c.copy_from_slice(&start);
        let scratch = &mut Scratch::new();
        // SAFETY: the matrices have the shapes and strides given; the instruction set is available.
        unsafe {
            let (pa, pb, pc) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
            match form {
                Form::Nt => gemm_nt(isa, scratch, m, n, k, pa, lda, pb, ldb, pc, ldc, accumulate),
                Form::Nn => gemm_nn(isa, scratch, m, n, k, pa, lda, pb, ldb, pc, ldc, accumulate),
                Form::Tn => gemm_tn(isa, scratch, m, n, k, pa, lda, pb, ldb, pc, ldc, accumulate),
            }
        }
        for (at, (&got, &want)) in c.iter().zip(&want).enumerate() {
            assert!(
                same(got, want),
                "{isa} {form:?} {} {values:?} m {m} n {n} k {k} accumulate {accumulate}: C[{}, {}] is {got:e} \
                 ({:#010x}), the chain gives {want:e} ({:#010x})",
                std::any::type_name::<T>(),
                at / ldc,
                at % ldc,
                got.to_bits(),
                want.to_bits(),
            );
        }
    }
}

const FORMS: [Form; 3] = [Form::Nt, Form::Nn, Form::Tn];

fn random_shapes<T: Chain>(seed: u64, values: Values) {
    let rng = &mut Rng(seed);
    for round in 0..60 {
        let m = 1 + rng.below(130);
        let n = if round % 3 == 0 { 1 + rng.below(90) } else { 8 * (1 + rng.below(12)) };
        let k = if round % 2 == 0 { 1 + rng.below(80) } else { 8 * (1 + rng.below(10)) };
        for form in FORMS {
            check::<T>(rng, form, (m, n, k), values, round % 4 < 2);
        }
    }
}

#[test]
fn bits_of_bf16() {
    random_shapes::<bf16>(1, Values::Plain);
}

#[test]
fn bits_of_f32() {
    random_shapes::<f32>(2, Values::Plain);
}

#[test]
fn bits_at_the_edges_of_the_range() {
    for values in [Values::Tiny, Values::Huge] {
        random_shapes::<bf16>(3, values);
        random_shapes::<f32>(4, values);
    }
}

#[test]
fn bits_across_blocks_of_m_and_k() {
    let rng = &mut Rng(5);
    for shape in [(3, 33, 1501), (14, 40, 1024), (300, 24, 515), (257, 8, 258), (1, 1, 513)] {
        for form in FORMS {
            for accumulate in [false, true] {
                check::<bf16>(rng, form, shape, Values::Plain, accumulate);
                check::<f32>(rng, form, shape, Values::Plain, accumulate);
            }
        }
    }
}

#[test]
fn every_row_count() {
    let rng = &mut Rng(6);
    for m in 1..=130 {
        for form in FORMS {
            check::<bf16>(rng, form, (m, 40, 18), Values::Plain, m % 2 == 0);
            check::<f32>(rng, form, (m, 40, 9), Values::Plain, m % 2 == 0);
        }
    }
}

#[test]
fn empty_shapes() {
    let rng = &mut Rng(7);
    for shape in [(0, 8, 8), (8, 0, 8), (5, 9, 0), (0, 0, 0)] {
        for form in FORMS {
            for accumulate in [false, true] {
                check::<bf16>(rng, form, shape, Values::Plain, accumulate);
                check::<f32>(rng, form, shape, Values::Plain, accumulate);
            }
        }
    }
}

#[test]
fn dense_does_not_depend_on_threads() {
    let rng = &mut Rng(8);
    let (m, n, k) = (37, 200, 130);
    let mut draw = |len: usize| -> Vec<bf16> {
        (0..len).map(|_| bf16::from_f32(rng.float(Values::Plain.operand()))).collect()
    };
    let (a, b) = (draw(m * k), draw(n * k));
    let product = |isa, threads| {
        let mut c = vec![f32::NAN; m * n];
        dense(isa, threads, m, n, k, &a, &b, &mut c);
        c.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let want = product(Isa::Scalar, 1);
    for isa in Isa::available() {
        for threads in [1, 2, 3, 16] {
            assert!(product(isa, threads) == want, "{isa} on {threads} threads");
        }
    }
}

#[test]
fn isa_names_parse_and_errors_list_them() {
    for isa in Isa::available() {
        assert_eq!(isa.to_string().parse(), Ok(isa));
    }
    let error = "sse".parse::<Isa>().unwrap_err().to_string();
    assert!(error.contains("sse") && error.contains("scalar"), "{error}");
    assert_eq!(Isa::available().last(), Some(&Isa::Scalar));
}
