// Go through purego, without cgo: the case `causal` of tests/data.
//
//	go run . LIBRARY FOLDER
package main

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"github.com/ebitengine/purego"
)

// The structures of flashattn.h as far as a forward call needs them by name: sizes and offsets are
// those of tests/abi/baseline.txt, which main checks.
type desc struct {
	structSize                   uint32
	device, deviceIndex          int32
	ops                          uint32
	dtype, dtypeO                int32
	headsQ, headsKV, dimQK, dimV int32
	layout                       uint32
	pageSize                     int32
	mask                         uint32
	window                       [2]int32
	chunk, blockQ, blockKV       int32
	bias                         uint32
	biasDtype                    int32
	features                     uint32
	determinism                  int32
	scale, softcap, dropout      float32
	splits                       int32
	limits                       [5]int32
	reserved0                    int32
	totals                       [3]int64
	reserved                     [4]int64
}

type shape struct {
	batch, seqlenQ, seqlenKV, reserved int32
	totalQ, totalKV                    int64
}

type tensor struct {
	data    unsafe.Pointer
	strides [3]int64
}

type inputs struct {
	q, k, v tensor
	rest    [28]uint64
}

type forwardArgs struct {
	structSize, reserved0 uint32
	shape                 shape
	inputs                inputs
	o                     tensor
	lse                   unsafe.Pointer
	reserved              [4]int64
}

var (
	planCreate    func(*desc, *unsafe.Pointer) int32
	planDestroy   func(unsafe.Pointer)
	workspaceSize func(unsafe.Pointer, uint32, *shape, *int64) int32
	forward       func(unsafe.Pointer, *forwardArgs, unsafe.Pointer, int64, unsafe.Pointer) int32
	lastError     func(*int32, unsafe.Pointer) string
)

func check(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func checkStatus(status int32) {
	if status != 0 {
		check(fmt.Errorf("status %d: %s", status, lastError(nil, nil)))
	}
}

// testCase is one paragraph of cases.txt, split into words.
type testCase struct {
	lines [][]string
	blob  []byte
}

func open(folder, name string) testCase {
	text, err := os.ReadFile(filepath.Join(folder, "cases.txt"))
	check(err)
	blob, err := os.ReadFile(filepath.Join(folder, "cases.bin"))
	check(err)
	_, after, _ := strings.Cut(string(text), "case "+name+"\n")
	paragraph, _, _ := strings.Cut(after, "\n\n")
	c := testCase{blob: blob}
	for _, line := range strings.Split(paragraph, "\n") {
		c.lines = append(c.lines, strings.Fields(line))
	}
	return c
}

// number is a field of a line "KIND FIELD=VALUE ..."; 0 when absent.
func (c testCase) number(kind, field string) int32 {
	for _, words := range c.lines {
		for _, word := range words[1:] {
			name, value, _ := strings.Cut(word, "=")
			if words[0] == kind && name == field {
				n, err := strconv.Atoi(value)
				check(err)
				return int32(n)
			}
		}
	}
	return 0
}

func (c testCase) find(name string) (bytes []byte, count int, words []string) {
	for _, words := range c.lines {
		if len(words) > 4 && words[1] == name && (words[0] == "array" || words[0] == "expect") {
			count := 1
			for _, dim := range strings.Split(words[3], ",") {
				n, err := strconv.Atoi(dim)
				check(err)
				count *= n
			}
			offset, err := strconv.Atoi(words[4])
			check(err)
			return c.blob[offset:], count, words
		}
	}
	check(fmt.Errorf("the case has no %s", name))
	return
}

func (c testCase) floats(name string) []float32 {
	bytes, count, _ := c.find(name)
	values := make([]float32, count)
	for n := range values {
		values[n] = math.Float32frombits(binary.LittleEndian.Uint32(bytes[4*n:]))
	}
	return values
}

// judge counts the numbers that are within the tolerance, and the others.
func (c testCase) judge(name string, got []float32) (passed, failed int) {
	bytes, count, words := c.find(name)
	tolerance, err := strconv.ParseFloat(words[5], 64)
	check(err)
	for n := 0; n < count; n++ {
		want := math.Float64frombits(binary.LittleEndian.Uint64(bytes[8*n:]))
		if math.Abs(float64(got[n])-want) <= tolerance {
			passed++
		} else {
			failed++
		}
	}
	return passed, failed
}

func main() {
	if unsafe.Sizeof(desc{}) != 184 || unsafe.Sizeof(forwardArgs{}) != 432 {
		check(fmt.Errorf("the structures here are not those of the header"))
	}
	library, err := purego.Dlopen(os.Args[1], purego.RTLD_NOW|purego.RTLD_LOCAL)
	check(err)
	purego.RegisterLibFunc(&planCreate, library, "flashattn_plan_create")
	purego.RegisterLibFunc(&planDestroy, library, "flashattn_plan_destroy")
	purego.RegisterLibFunc(&workspaceSize, library, "flashattn_workspace_size")
	purego.RegisterLibFunc(&forward, library, "flashattn_forward")
	purego.RegisterLibFunc(&lastError, library, "flashattn_last_error")

	c := open(os.Args[2], "causal")
	d := desc{structSize: uint32(unsafe.Sizeof(desc{})), dtype: c.number("desc", "dtype"),
		headsQ: c.number("desc", "heads_q"), dimQK: c.number("desc", "dim_qk"),
		mask: uint32(c.number("desc", "mask")), features: uint32(c.number("desc", "features"))}
	args := forwardArgs{structSize: uint32(unsafe.Sizeof(forwardArgs{})),
		shape: shape{batch: c.number("shape", "batch"), seqlenQ: c.number("shape", "seqlen_q"),
			seqlenKV: c.number("shape", "seqlen_kv")}}

	// The arguments hold pointers to Go's memory, which must not move during the call.
	var pinned runtime.Pinner
	defer pinned.Unpin()
	pin := func(values []float32) unsafe.Pointer {
		pinned.Pin(&values[0])
		return unsafe.Pointer(&values[0])
	}
	_, sizeO, _ := c.find("o")
	_, sizeLSE, _ := c.find("lse")
	o, lse := make([]float32, sizeO), make([]float32, sizeLSE)
	args.inputs.q.data, args.inputs.k.data = pin(c.floats("q")), pin(c.floats("k"))
	args.inputs.v.data, args.o.data, args.lse = pin(c.floats("v")), pin(o), pin(lse)

	var plan unsafe.Pointer
	var bytes int64
	checkStatus(planCreate(&d, &plan))
	checkStatus(workspaceSize(plan, 1, &args.shape, &bytes))
	workspace := make([]byte, bytes+1)
	checkStatus(forward(plan, &args, unsafe.Pointer(&workspace[0]), bytes, nil))
	planDestroy(plan)

	passedO, failedO := c.judge("o", o)
	passedLSE, failedLSE := c.judge("lse", lse)
	failed := failedO + failedLSE
	fmt.Printf("%d passed, %d failed, 0 skipped\n", passedO+passedLSE, failed)
	if failed > 0 {
		os.Exit(1)
	}
}
