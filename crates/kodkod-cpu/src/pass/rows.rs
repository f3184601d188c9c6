//! What happens to rows between the GEMMs: activation, rounding, weighted sums.
//!
//! Each function is one plain loop, compiled once for every instruction set: wider registers, the same operations in
//! the same order, hence the same bits. Nothing here may fuse a multiply with an add.

use kodkod_core::Element;
use kodkod_core::numerics::{Act, ClampRounding, dot};

use crate::gemm::Isa;

/// Compiles the body of a function for each instruction set and picks one at run time.
macro_rules! per_isa {
    ($(#[$doc:meta])* fn $name:ident<$($g:ident: $bound:path),*>($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$doc])*
        pub(super) fn $name<$($g: $bound),*>(isa: Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$($g: $bound),*>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
            fn avx512<$($g: $bound),*>($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2<$($g: $bound),*>($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }

            match isa {
                // SAFETY: a group only takes an instruction set that this CPU has.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Bf16 | Isa::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => unsafe { avx2($($arg),*) },
                _ => body($($arg),*),
            }
        }
    };
}

per_isa! {
    /// `g`, `u` rounded from their accumulators plus biases (0.0 where there are none), on their side of the clamp.
    fn store_gate_up<T: Element>(
        act: &Act, acc_g: &[f32], acc_u: &[f32], bias: Option<(&[f32], &[f32])>, g: &mut [T], u: &mut [T],
    ) {
        let n = acc_g.len();
        let (acc_u, g, u) = (&acc_u[..n], &mut g[..n], &mut u[..n]);
        let bias = bias.map(|(bias_g, bias_u)| (&bias_g[..n], &bias_u[..n]));
        match (bias, ClampRounding::new::<T>(act)) {
            (None, None) => {
                for i in 0..n {
                    g[i] = T::from_f32(acc_g[i]);
                    u[i] = T::from_f32(acc_u[i]);
                }
            }
            (Some((bias_g, bias_u)), None) => {
                for i in 0..n {
                    g[i] = T::from_f32(acc_g[i] + bias_g[i]);
                    u[i] = T::from_f32(acc_u[i] + bias_u[i]);
                }
            }
            (None, Some(clamp)) => {
                for i in 0..n {
                    g[i] = clamp.gate(acc_g[i]);
                    u[i] = clamp.up(acc_u[i]);
                }
            }
            (Some((bias_g, bias_u)), Some(clamp)) => {
                for i in 0..n {
                    g[i] = clamp.gate(acc_g[i] + bias_g[i]);
                    u[i] = clamp.up(acc_u[i] + bias_u[i]);
                }
            }
        }
    }
}

per_isa! {
    /// `h = act(g, u)`, rounded.
    fn activate<T: Element>(act: &Act, g: &[T], u: &[T], h: &mut [T]) {
        let n = h.len();
        let (g, u) = (&g[..n], &u[..n]);
        for i in 0..n {
            h[i] = T::from_f32(act.forward(g[i].to_f32(), u[i].to_f32()));
        }
    }
}

per_isa! {
    /// An accumulator plus a bias, rounded.
    fn store<T: Element>(acc: &[f32], bias: Option<&[f32]>, out: &mut [T]) {
        let n = out.len();
        let acc = &acc[..n];
        match bias {
            None => {
                for i in 0..n {
                    out[i] = T::from_f32(acc[i]);
                }
            }
            Some(bias) => {
                let bias = &bias[..n];
                for i in 0..n {
                    out[i] = T::from_f32(acc[i] + bias[i]);
                }
            }
        }
    }
}

per_isa! {
    /// The backward of the activation for one row and tile, `d = dh'` unscaled, `w` the router weight:
    /// `dg = (w dh') dact/dg`, `du = (w dh') dact/du`, `wh = w h`; returns `sum_i dh'_i h_i`.
    fn activation_backward<T: Element>(
        act: &Act, w: f32, d: &mut [f32], g: &[T], u: &[T], dg: &mut [T], du: &mut [T], wh: &mut [T],
    ) -> f32 {
        let n = d.len();
        let (g, u, dg, du, wh) = (&g[..n], &u[..n], &mut dg[..n], &mut du[..n], &mut wh[..n]);
        for i in 0..n {
            let (h, h_g, h_u) = act.backward(g[i].to_f32(), u[i].to_f32());
            let h = T::from_f32(h).to_f32();
            let scaled = w * d[i];
            dg[i] = T::from_f32(scaled * h_g);
            du[i] = T::from_f32(scaled * h_u);
            wh[i] = T::from_f32(w * h);
            d[i] *= h;
        }
        let d = &d[..n];
        dot(n, |i| d[i])
    }
}

per_isa! {
    /// `sum_i a_i b_i` in `f32`.
    fn dot_row<T: Element>(a: &[T], b: &[f32]) -> f32 {
        let b = &b[..a.len()];
        dot(a.len(), |i| a[i].to_f32() * b[i])
    }
}

per_isa! {
    /// `acc += w * row`, multiplied and added apart.
    fn add_scaled<T: Element>(acc: &mut [f32], w: f32, row: &[T]) {
        let row = &row[..acc.len()];
        for i in 0..acc.len() {
            acc[i] += w * row[i].to_f32();
        }
    }
}

per_isa! {
    /// `acc += row`.
    fn add<T: Element>(acc: &mut [f32], row: &[T]) {
        let row = &row[..acc.len()];
        for i in 0..acc.len() {
            acc[i] += row[i].to_f32();
        }
    }
}
