//! Span plans: pairs of spans in order, merged, cut into units, never written twice.

use std::ops::ControlFlow;

use pdkv_core::ErrorKind;
use pdkv_core::plan::Plan;
use pdkv_core::span::Span;
use proptest::prelude::*;

type Bytes = Vec<((u32, u64), (u32, u64))>;

fn walked(plan: &Plan, from: u64, to: u64) -> Vec<(Span, Span)> {
    let mut pairs = Vec::new();
    let flow = plan.walk(from..to, |run| {
        pairs.push((
            Span::new(run.src.region, run.src.offset, run.len),
            Span::new(run.dst.region, run.dst.offset, run.len),
        ));
        ControlFlow::Continue(())
    });
    assert!(flow.is_continue());
    pairs
}

fn bytes(pairs: &[(Span, Span)]) -> Bytes {
    let mut bytes: Bytes = pairs
        .iter()
        .flat_map(|(src, dst)| {
            (0..src.len).map(move |byte| ((dst.region, dst.offset + byte), (src.region, src.offset + byte)))
        })
        .collect();
    bytes.sort_unstable();
    bytes
}

fn check(src: &[Span], dst: &[Span], bounds: &[u64], cut: u64) -> Result<(), TestCaseError> {
    let expected = bytes(&src.iter().copied().zip(dst.iter().copied()).collect::<Vec<_>>());
    let unique = expected.windows(2).all(|pair| pair[0].0 < pair[1].0);
    let plan = Plan::spans(src, bounds, dst, bounds);
    prop_assert_eq!(plan.is_ok(), unique);
    let Ok(plan) = plan else { return Ok(()) };
    let all = walked(&plan, 0, u64::MAX);
    prop_assert_eq!(&bytes(&all), &expected);
    prop_assert_eq!(all.len() as u64, plan.run_count());
    prop_assert_eq!(plan.total_bytes(), expected.len() as u64);
    let mut parts = walked(&plan, cut, u64::MAX);
    parts.extend(walked(&plan, 0, cut));
    prop_assert_eq!(&bytes(&parts), &expected);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Any pairs: accepted exactly when no destination byte comes twice. A large scale leaves the
    /// proof to sorting, a small one to marks.
    #[test]
    fn pairs_are_copied_once_or_refused(
        pairs in prop::collection::vec(((0_u32..2, 0_u64..80), (0_u32..2, 0_u64..12), 0_u64..8), 0..12),
        scale in prop_oneof![Just(1_u64), Just(8), Just(1 << 36)],
        cut in 0_u64..14,
    ) {
        let src: Vec<_> = pairs.iter().map(|&((region, offset), _, len)| Span::new(region, offset, len)).collect();
        let dst: Vec<_> = pairs
            .iter()
            .map(|&(_, (region, offset), len)| Span::new(region, offset * scale, len))
            .collect();
        check(&src, &dst, &[scale * 100 + 100; 2], cut)?;
    }

    /// One range cut in pieces, in any order, so that many neighbours meet on one side or both.
    #[test]
    fn pieces_of_a_range_merge(
        cuts in prop::collection::btree_set(0_u64..60, 2..15),
        keys in prop::collection::vec(0_u32..8, 15),
        shuffled in any::<bool>(),
        apart in prop::collection::vec(prop_oneof![4 => Just(0_u64), 1 => 1_u64..9], 15),
    ) {
        let cuts: Vec<_> = cuts.into_iter().collect();
        let mut pieces: Vec<_> = cuts.windows(2).map(|pair| Span::new(0, pair[0], pair[1] - pair[0])).collect();
        if shuffled {
            let mut keyed: Vec<_> = pieces.iter().copied().zip(keys).collect();
            keyed.sort_by_key(|&(_, key)| key);
            pieces = keyed.into_iter().map(|(piece, _)| piece).collect();
        }
        let moved = |span: &Span, by: u64| Span { offset: span.offset + by, ..*span };
        let sources: Vec<_> = pieces.iter().zip(apart).map(|(span, by)| moved(span, by)).collect();
        check(&sources, &pieces, &[100], 3)?;
        if !shuffled {
            let plan = Plan::spans(&pieces, &[100], &pieces, &[100]).unwrap();
            prop_assert_eq!(plan.run_count(), 1);
        }
    }
}

#[test]
fn a_huge_span_is_many_units_and_one_run() {
    let len = (1 << 40) + 12345;
    let (src, dst) = ([Span::new(0, 7, len)], [Span::new(1, 1 << 50, len)]);
    let plan = Plan::spans(&src, &[1 << 60], &dst, &[0, 1 << 60]).unwrap();
    assert_eq!((plan.run_count(), plan.total_bytes()), (1, len));
    assert!(plan.unit_count() > 1 << 20);
    assert_eq!(walked(&plan, 0, u64::MAX), [(src[0], dst[0])]);
    let mut next = 0;
    for unit in [0, 1, 1000, plan.unit_count() - 1] {
        let [(from, to)] = walked(&plan, unit, unit + 1)[..] else {
            panic!("one unit is one run")
        };
        assert_eq!((from.offset - 7, from.len), (to.offset - (1 << 50), to.len));
        assert!(from.offset >= next);
        next = from.end().unwrap();
    }
    assert_eq!(next, 7 + len);
}

#[test]
fn what_does_not_fit_is_refused() {
    let bounds = [100];
    let span = |offset, len| Span::new(0, offset, len);
    let cases = [
        (vec![span(0, 4)], vec![], ErrorKind::Layout),
        (vec![span(0, 4)], vec![span(0, 5)], ErrorKind::Layout),
        (vec![span(97, 4)], vec![span(0, 4)], ErrorKind::Region),
        (vec![span(0, 4)], vec![span(97, 4)], ErrorKind::Region),
        (vec![span(u64::MAX, 4)], vec![span(0, 4)], ErrorKind::Region),
        (vec![Span::new(1, 0, 4)], vec![span(0, 4)], ErrorKind::Region),
        (
            vec![span(0, 4), span(8, 4)],
            vec![span(4, 4), span(1, 4)],
            ErrorKind::Layout,
        ),
    ];
    for (src, dst, kind) in cases {
        let error = Plan::spans(&src, &bounds, &dst, &bounds).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
    }
    let most = u64::MAX;
    let whole = [Span::new(0, 0, most), Span::new(1, 0, most)];
    let error = Plan::spans(&whole, &[most; 2], &whole, &[most; 2]).unwrap_err();
    assert!(error.message().contains("beyond 64 bits"), "{error}");
}
