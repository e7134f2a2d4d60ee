//! Tables against the lists they were made from.

use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn it_is_the_list_it_was_made_from(ids in prop::collection::vec(0_u32..40, 0..60), first in 0_usize..70, count in 0_usize..70) {
        let table = BlockTable::from_ids(&ids);
        prop_assert_eq!(table.iter().collect::<Vec<_>>(), ids.clone());
        prop_assert_eq!(table.len(), ids.len());
        for position in 0..=ids.len() {
            prop_assert_eq!(table.get(position), ids.get(position).copied());
        }
        prop_assert_eq!(&BlockTable::from_runs(table.runs()).unwrap(), &table);
        if let Some(part) = ids.get(first..first + count) {
            prop_assert_eq!(table.slice(first, count).unwrap(), BlockTable::from_ids(part));
        } else {
            prop_assert_eq!(table.slice(first, count).unwrap_err().kind(), ErrorKind::Layout);
        }
    }

    #[test]
    fn duplicates_are_found_by_bits_and_by_sorting(ids in prop::collection::vec(0_u32..200, 0..25)) {
        let mut once = ids.clone();
        once.sort_unstable();
        once.dedup();
        let unique = once.len() == ids.len();
        let table = BlockTable::from_ids(&ids);
        prop_assert_eq!(table.check_unique(200).is_ok(), unique);
        prop_assert_eq!(table.check_unique(u32::MAX).is_ok(), unique);
    }
}

#[test]
fn a_bad_signed_id_names_index_and_value() {
    assert_eq!(
        BlockTable::from_ids_i64(&[1, 2]).unwrap(),
        BlockTable::from_ids(&[1, 2])
    );
    for (ids, value) in [([0, -1], "`-1`"), ([0, 1 << 32], "`4294967296`")] {
        let error = BlockTable::from_ids_i64(&ids).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Layout);
        assert!(
            error.message().contains(value) && error.message().contains("index `1`"),
            "{error}"
        );
    }
    assert!(BlockTable::from_ids_i32(&[-7]).is_err());
}

#[test]
fn out_of_range_names_the_block_and_the_bound() {
    let table = BlockTable::from_ids(&[5, 1022, 1023, 1024]);
    assert!(table.validate(1025).is_ok());
    let error = table.validate(1024).unwrap_err();
    assert!(
        error.message().contains("`1024` at position `3`") && error.message().contains("`1024` blocks"),
        "{error}"
    );
}

#[test]
fn a_duplicate_names_block_and_positions() {
    let error = BlockTable::from_ids(&[9, 4, 5, 6, 5]).check_unique(10).unwrap_err();
    assert!(
        error.message().contains("block `5`") && error.message().contains("[2, 4]"),
        "{error}"
    );
}

#[test]
fn the_last_id_does_not_wrap_into_the_first() {
    let table = BlockTable::from_ids(&[u32::MAX, 0]);
    assert_eq!(table.runs().len(), 2);
    assert!(
        BlockTable::from_runs(&[BlockRun {
            start: u32::MAX,
            len: 2
        }])
        .is_err()
    );
    assert!(BlockTable::from_runs(&[BlockRun { start: 3, len: 0 }]).is_err());
}
