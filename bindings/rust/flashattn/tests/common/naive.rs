//! Attention as the formula says it, in float64.

/// o of one head: q (sq, d), k (sk, d), v (sk, dv), causal with the ends aligned.
pub fn attention(q: &[f32], k: &[f32], v: &[f32], d: usize, dv: usize, causal: bool) -> Vec<f32> {
    let (sq, sk) = (q.len() / d, k.len() / d);
    let scale = 1.0 / (d as f64).sqrt();
    let mut o = vec![0f32; sq * dv];
    for i in 0..sq {
        let visible = |j: usize| !causal || j as i64 <= i as i64 + sk as i64 - sq as i64;
        let score = |j: usize| -> f64 {
            let pairs = q[i * d..][..d].iter().zip(&k[j * d..][..d]);
            scale * pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
        };
        let scores: Vec<(usize, f64)> =
            (0..sk).filter(|&j| visible(j)).map(|j| (j, score(j))).collect();
        let most = scores.iter().map(|s| s.1).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s.1 - most).exp()).sum();
        for c in 0..dv {
            let weighted = scores.iter().map(|(j, s)| (s - most).exp() * f64::from(v[j * dv + c]));
            o[i * dv + c] = if sum > 0.0 { (weighted.sum::<f64>() / sum) as f32 } else { 0.0 };
        }
    }
    o
}
