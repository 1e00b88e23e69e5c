//! The gradient: one step of burn's graph, computed by the library from lse.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::Autodiff;

use crate::{Arrays, AttentionBackend, AttentionKernels, Call, Given, Gradients, Options};

/// What backward needs of its forward.
#[derive(Clone, Debug)]
struct State<T> {
    arrays: Arrays<T>,
    options: Options,
    o: T,
    lse: T,
}

/// Parents: q, k, v, the bias where there is one, the sink where there is one.
#[derive(Debug)]
struct FlashAttention;

impl<B: AttentionKernels, const N: usize> Backward<B, N> for FlashAttention {
    type State = State<FloatTensor<B>>;

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        gradients: &mut grads::Gradients,
        _: &mut Checkpointer,
    ) {
        let gradient = gradients.consume::<B>(&ops.node);
        let State { arrays, options, o, lse } = ops.state;
        let wanted = |given: bool, at: usize| given && ops.parents[at].is_some();
        let has_bias = arrays.bias.is_some();
        let wanted =
            [wanted(has_bias, 3), wanted(arrays.sink.is_some(), 3 + usize::from(has_bias))];
        let result = B::attention_backward(&arrays, &options, [&o, &lse], gradient, wanted);
        let Gradients { query, key, value, bias, sink } =
            result.unwrap_or_else(|error| panic!("flash-attn: {error}"));
        let mut found = vec![Some(query), Some(key), Some(value)];
        if has_bias {
            found.push(bias);
        }
        if arrays.sink.is_some() {
            found.push(sink);
        }
        for (parent, gradient) in ops.parents.iter().zip(found) {
            if let (Some(node), Some(gradient)) = (parent, gradient) {
                gradients.register::<B>(node.id, gradient);
            }
        }
    }
}

fn record<B: AttentionKernels, C: CheckpointStrategy, const N: usize>(
    nodes: [NodeGuard; N],
    arrays: Arrays<FloatTensor<B>>,
    call: &Call,
) -> FloatTensor<Autodiff<B, C>> {
    let forward = |lse| {
        let result = B::attention_forward(&arrays, &call.options, lse);
        call.result(result, || (arrays.query.clone(), Some(arrays.query.clone())))
    };
    match FlashAttention.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::UnTracked(prep) => prep.finish(forward(false).0),
        OpsKind::Tracked(prep) => {
            let (o, lse) = forward(true);
            let (options, lse) = (call.options.clone(), lse.expect("it was asked for"));
            prep.finish(State { arrays, options, o: o.clone(), lse }, o)
        }
    }
}

impl<B: AttentionKernels, C: CheckpointStrategy> AttentionBackend for Autodiff<B, C> {
    fn flash_attention(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        bias: Given<Self>,
        sink: Given<Self>,
        call: Call,
    ) -> FloatTensor<Self> {
        let ((query, q), (key, k), (value, v)) =
            (query.into_parts(), key.into_parts(), value.into_parts());
        let arrays = |bias, sink| Arrays { query, key, value, bias, sink };
        let parts = |given: Given<Self>| given.option().map(|tensor| tensor.into_parts());
        match (parts(bias), parts(sink)) {
            (None, None) => record::<B, C, 3>([q, k, v], arrays(None, None), &call),
            (Some((bias, b)), None) => {
                record::<B, C, 4>([q, k, v, b], arrays(Some(bias), None), &call)
            }
            (None, Some((sink, s))) => {
                record::<B, C, 4>([q, k, v, s], arrays(None, Some(sink)), &call)
            }
            (Some((bias, b)), Some((sink, s))) => {
                record::<B, C, 5>([q, k, v, b, s], arrays(Some(bias), Some(sink)), &call)
            }
        }
    }
}
