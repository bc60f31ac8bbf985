#!/usr/bin/env bash
# Count a dump on several machines: an array job, and a job that makes the table when it has ended well.
#   submit.sh TASKS RUN TABLE [options of `deltad table`]
#   submit.sh 8 s3://bucket/run table.json --protocol all
set -euo pipefail
tasks=${1:?number of tasks}
run=${2:?RUN, a folder or a URL}
table=${3:?file of the table}
shift 3
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d "$PWD/shards-XXXXXX")  # where all machines see it
array=$(sbatch --parsable --array="1-$tasks" "$here/table.sbatch" "$run" "$folder" "$tasks" "$@")
merge=$(sbatch --parsable --dependency="afterok:$array" "$here/merge.sbatch" "$folder" "$table" "$@")
echo "job $array reads $run, job $merge writes $table"
