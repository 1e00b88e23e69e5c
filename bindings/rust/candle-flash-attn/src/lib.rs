//! The crate `flashattn-candle` under another name.

pub use flashattn_candle::*;
