//! What planning costs at 100,000 blocks x 80 layers, block tables included, and what a walk costs.
//!
//! Also here: a table of 4,096 ids, which is on the path of every call, and the memory of a plan.
#![expect(clippy::print_stdout, reason = "the memory of a plan is a result of this benchmark")]
#![allow(missing_docs, reason = "criterion's macros make an undocumented function")]

use std::hint::black_box;
use std::ops::ControlFlow;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pdkv_core::block_table::BlockTable;
use pdkv_core::dtype::DType;
use pdkv_core::layout::{KvLayout, LayerTensors, LayoutRequest, TensorFacts};
use pdkv_core::plan::{PageWalk, Plan, Selection, WireOrder};
use pdkv_core::span::Span;

const BLOCKS: u32 = 100_000;
const POOL: u32 = 131_072;
const LAYERS: u64 = 80;

/// How 80 layers lie in memory.
#[derive(Clone, Copy)]
enum Form {
    LayerCompactHnd,
    LayerCompactNhd,
    BlockOutermost,
}

fn layout(form: Form) -> KvLayout {
    let (heads, tokens, content) = (8_i64, 16_i64, 512_i64);
    let page = heads * tokens * content;
    let tensors: Vec<_> = (0..LAYERS)
        .map(|layer| {
            let (address, block) = match form {
                Form::BlockOutermost => ((1 << 40) + layer * page.cast_unsigned(), page * LAYERS.cast_signed()),
                _ => ((1 + layer) << 40, page),
            };
            let (head, token) = match form {
                Form::LayerCompactNhd => (content, heads * content),
                _ => (tokens * content, content),
            };
            LayerTensors::Joined(TensorFacts {
                name: format!("layers.{layer}"),
                address,
                shape: vec![u64::from(POOL), heads.cast_unsigned(), tokens.cast_unsigned(), 256],
                strides_bytes: vec![block, head, token, 2],
                item_bytes: 2,
                dtype: DType::BF16,
            })
        })
        .collect();
    let request = LayoutRequest::parse("BHNC", 16).expect("known axes");
    request.resolve(&tensors).expect("a valid layout").layout
}

/// `count` of `POOL` ids: a seeded shuffle of runs of `run` consecutive ids.
fn ids(count: u32, run: u32, seed: u64) -> Vec<u32> {
    let mut starts: Vec<u32> = (0..POOL / run).map(|index| index * run).collect();
    let mut state = seed;
    for index in (1..starts.len()).rev() {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        starts.swap(index, ((state >> 33) % (index as u64 + 1)) as usize);
    }
    starts
        .into_iter()
        .flat_map(|start| start..start + run)
        .take(count as usize)
        .collect()
}

fn tables(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("block_table");
    for (name, count, run) in [
        ("4096 random", 4096, 1),
        ("100000 random", BLOCKS, 1),
        ("100000 runs of 16", BLOCKS, 16),
    ] {
        let ids = ids(count, run, 1);
        let signed: Vec<i64> = ids.iter().map(|&id| i64::from(id)).collect();
        group.bench_function(BenchmarkId::new("u32", name), |b| {
            b.iter(|| BlockTable::from_ids(black_box(&ids)));
        });
        group.bench_function(BenchmarkId::new("i64", name), |b| {
            b.iter(|| BlockTable::from_ids_i64(black_box(&signed)));
        });
    }
    group.finish();
}

fn planning(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("plan_100000x80");
    let layout = layout(Form::LayerCompactHnd);
    let all = Selection::all(&layout);
    for (name, run) in [("runs of 16", 16), ("random", 1)] {
        let (src, dst) = (ids(BLOCKS, run, 1), ids(BLOCKS, run, 2));
        let make = || {
            let (src, dst) = (
                BlockTable::from_ids(black_box(&src)),
                BlockTable::from_ids(black_box(&dst)),
            );
            Plan::pages(&layout, &src, &layout, &dst, &all).expect("a valid plan")
        };
        let plan = make();
        println!(
            "plan of 100000 blocks x 80 layers, {name}: {} bytes\n{}",
            plan.memory_bytes(),
            plan.explain()
        );
        group.bench_function(BenchmarkId::new("tables and plan", name), |b| b.iter(make));
    }
    group.finish();
}

fn walking(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("walk");
    let (src, dst) = (
        BlockTable::from_ids(&ids(BLOCKS, 1, 1)),
        BlockTable::from_ids(&ids(BLOCKS, 1, 2)),
    );
    let cases = [
        ("layer-compact", Form::LayerCompactHnd, Form::LayerCompactHnd),
        ("block-outermost", Form::BlockOutermost, Form::BlockOutermost),
        ("outermost to compact", Form::BlockOutermost, Form::LayerCompactHnd),
        ("hnd to nhd", Form::LayerCompactHnd, Form::LayerCompactNhd),
    ];
    for (name, from, to) in cases {
        let (from, to) = (layout(from), layout(to));
        let plan = Plan::pages(&from, &src, &to, &dst, &Selection::all(&from)).expect("a valid plan");
        let units = plan.unit_count().min(200_000);
        let mut runs = 0_u64;
        let _ = plan.walk(0..units, |_| {
            runs += 1;
            ControlFlow::Continue(())
        });
        group.throughput(Throughput::Elements(runs));
        group.bench_function(BenchmarkId::new("plan", name), |b| {
            b.iter(|| {
                plan.walk(0..units, |run| {
                    black_box(run);
                    ControlFlow::Continue(())
                })
            });
        });
    }
    for (name, form, order) in [
        ("natural", Form::LayerCompactHnd, None),
        (
            "compact, block-major",
            Form::LayerCompactHnd,
            Some(WireOrder::BLOCK_MAJOR),
        ),
        ("nhd in hnd order", Form::LayerCompactNhd, Some(WireOrder::LAYER_MAJOR)),
    ] {
        let layout = layout(form);
        let order = order.unwrap_or_else(|| WireOrder::natural(&layout));
        let walk = PageWalk::scatter(&layout, &dst, &Selection::all(&layout), order).expect("a valid walk");
        let units = walk.unit_count().min(20_000);
        let mut spans = 0_u64;
        let _ = walk.walk(0..units, |_| {
            spans += 1;
            ControlFlow::Continue(())
        });
        group.throughput(Throughput::Elements(spans));
        group.bench_function(BenchmarkId::new("page_walk", name), |b| {
            b.iter(|| {
                walk.walk(0..units, |span| {
                    black_box(span);
                    ControlFlow::Continue(())
                })
            });
        });
    }
    group.finish();
}

fn explicit(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("spans");
    let spans = |count: u32, seed: u64| -> Vec<Span> {
        let block = |id: u32| Span::new(0, u64::from(id) * 4096, 4096);
        ids(count, 1, seed).into_iter().map(block).collect()
    };
    for count in [1, BLOCKS] {
        let (src, dst) = (spans(count, 1), spans(count, 2));
        let bytes = [u64::from(POOL) * 4096];
        group.bench_function(BenchmarkId::new("plan", count), |b| {
            b.iter(|| Plan::spans(black_box(&src), &bytes, black_box(&dst), &bytes).expect("a valid plan"));
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    targets = tables, planning, walking, explicit
}
criterion_main!(benches);
